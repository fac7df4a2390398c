"""Values that end with the last who holds them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from waystation.runtime.objects import Held

HOLDERS = ["a", "b"]
NAMES = ["x", "y", "z"]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["hold", "release", "drop"]), st.sampled_from(NAMES), st.sampled_from(HOLDERS))
)


@given(ACTIONS)
def test_a_value_is_there_for_as_long_as_it_is_held(actions: list[tuple[str, str, str]]) -> None:
    held: Held[str] = Held()
    model: dict[str, Counter[str]] = {holder: Counter() for holder in HOLDERS}
    for action, name, holder in actions:
        before = {each for each in NAMES if any(counts[each] for counts in model.values())}
        if action == "hold":
            model[holder][name] += 1
            held.hold(name, holder)
            held.set(name, f"value of {name}")
            ended = []
        elif action == "release":
            model[holder][name] = max(0, model[holder][name] - 1)
            released = held.release(name, holder)
            ended = [] if released is None else [released]
        else:
            model[holder].clear()
            ended = held.drop(holder)
        after = {each for each in NAMES if any(counts[each] for counts in model.values())}
        assert sorted(ended) == sorted(f"value of {each}" for each in before - after)
        assert {each for each in NAMES if each in held} == after
        assert {each for each in NAMES if held.get(each) is not None} == after
        assert len(held) == len(after)


def test_a_name_may_be_held_before_it_has_a_value() -> None:
    held: Held[str] = Held()
    held.set("x", "nobody's")
    assert held.get("x") is None
    held.hold("x", "a")
    assert held.get("x") is None
    held.set("x", "theirs")
    assert held.get("x") == "theirs"
