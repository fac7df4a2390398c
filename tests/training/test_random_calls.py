"""Random sequences of calls do the same as with genuine Orbax: they return the same, raise the same built-in
errors, and leave the same steps. What is different on purpose is a rule of its own here, and a row of
`docs/orbax.md`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.long import amount
from tests.training.pair import Pair, Policy

FAR_AWAY_S = 1_000_000  # no test is about time


def loss_of(metrics: dict[str, float]) -> float:
    return metrics["loss"]


def one_of(*policies: Policy) -> st.SearchStrategy[Policy]:
    return st.sampled_from(policies)


counts = st.one_of(st.none(), st.integers(0, 2))
step_sets = st.frozensets(st.integers(0, 9), max_size=5)

save_policies = st.one_of(
    st.integers(1, 3).map(lambda n: Policy("FixedIntervalPolicy", {"interval": n})),
    step_sets.map(lambda steps: Policy("SpecificStepsPolicy", {"steps": steps})),
    st.sampled_from([None, FAR_AWAY_S]).map(
        lambda secs: Policy("ContinuousCheckpointingPolicy", {"minimum_interval_secs": secs})
    ),
    one_of(Policy("InitialSavePolicy"), Policy("PreemptionCheckpointingPolicy")),
    step_sets.map(
        lambda steps: Policy(
            "AnySavePolicy",
            parts=(Policy("InitialSavePolicy"), Policy("SpecificStepsPolicy", {"steps": steps})),
        )
    ),
)
single_preservation_policies = st.one_of(
    one_of(Policy("PreserveAll"), Policy("EveryNSeconds", {"interval_secs": FAR_AWAY_S})),
    counts.map(lambda n: Policy("LatestN", {"n": n})),
    st.builds(
        lambda steps, exact, most: Policy(
            "EveryNSteps", {"interval_steps": steps, "exact_interval": exact, "max_to_keep": most}
        ),
        st.integers(1, 4),
        st.booleans(),
        counts,
    ),
    st.builds(
        lambda steps, most: Policy("EveryNStepsClosest", {"interval_steps": steps, "max_to_keep": most}),
        st.integers(1, 4),
        counts,
    ),
    step_sets.map(lambda steps: Policy("CustomSteps", {"steps": steps})),
    st.builds(
        lambda reverse, n, others: Policy(
            "BestN",
            {
                "get_metric_fn": loss_of,
                "reverse": reverse,
                "n": n,
                "keep_checkpoints_without_metrics": others,
            },
        ),
        st.booleans(),
        counts,
        st.booleans(),
    ),
)
preservation_policies = st.one_of(
    single_preservation_policies,
    st.lists(single_preservation_policies, min_size=2, max_size=2).map(
        lambda parts: Policy("AnyPreservationPolicy", parts=tuple(parts))
    ),
)

steps = st.integers(0, 9)
losses = st.sampled_from([None, 0.5, 1.0, 2.0])
names = st.sampled_from([None, "state", "extra", "absent", "metrics", "", "a/b"])

WRONG: dict[str, Callable[[Any], Any]] = {
    "no checkpointables": lambda checkpointer: checkpointer.save_checkpointables(9, {}),
    "a reserved name": lambda checkpointer: checkpointer.save_checkpointables(9, {"metrics": {"a": 1}}),
    "an empty name": lambda checkpointer: checkpointer.save_checkpointables(9, {"": {"a": 1}}),
    "a list": lambda checkpointer: checkpointer.save_checkpointables(9, [1]),
    "an object": lambda checkpointer: checkpointer.save(9, {"a": object()}, force=True, overwrite=True),
    "a negative step": lambda checkpointer: checkpointer.delete(-1),
    "a step as text": lambda checkpointer: checkpointer.delete("1"),
    "a step as a truth": lambda checkpointer: checkpointer.delete(True),
    "a truth as a number": lambda checkpointer: checkpointer.delete(1, missing_ok=1),
    "a name as a number": lambda checkpointer: checkpointer.delete(1, checkpointable_name=1),
}


class SameCalls(RuleBasedStateMachine):
    """Calls of both libraries, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self._count = 0
        self._pair: Pair | None = None
        self._is_timed = False

    @initialize(save=save_policies, keep=preservation_policies, prefix=st.sampled_from([None, "step"]))
    def open(self, save: Policy, keep: Policy, prefix: str | None) -> None:
        self._pair = Pair(Path(self._directory.name), save, keep, prefix)
        self._is_timed = "ContinuousCheckpointingPolicy" in save.names()

    @property
    def pair(self) -> Pair:
        assert self._pair is not None
        return self._pair

    def teardown(self) -> None:
        if self._pair is not None:
            self._pair.close()
        self._directory.cleanup()

    def _state(self) -> dict[str, Any]:
        """Another one each time."""
        self._count += 1
        return {"a": np.full(3, self._count), "count": self._count}

    # ---- saves ---------------------------------------------------------------------------------

    @rule(step=steps, force=st.booleans(), overwrite=st.booleans(), loss=losses, later=st.booleans())
    def save(self, step: int, force: bool, overwrite: bool, loss: float | None, later: bool) -> None:
        state = self._state()
        options = {
            "force": force,
            "overwrite": overwrite,
            "metrics": None if loss is None else {"loss": loss},
            "custom_metadata": {"count": self._count},
        }

        def call(checkpointer: Any) -> Any:
            if not later:
                return checkpointer.save(step, state, **options)
            response = checkpointer.save_async(step, state, **options)
            return None if response is None else response.result()

        was_there = step in self.pair.listed()
        saved = self.pair.same(call)
        self._allow_for_differences(step, replaced_in_vain=was_there and overwrite and not saved)

    @rule(step=steps, force=st.booleans())
    def save_two_things(self, step: int, force: bool) -> None:
        things = {"state": self._state(), "extra": {"b": np.arange(self._count)}}
        self.pair.same(lambda checkpointer: checkpointer.save_checkpointables(step, things, force=force))
        self._allow_for_differences(step)

    @precondition(lambda self: not self._is_timed)
    @rule(step=steps, further=st.integers(1, 9))
    def save_while_another_is_saved(self, step: int, further: int) -> None:
        # Another step: Orbax deletes what is being saved of a step that is to be overwritten, and fails.
        other = (step + further) % 10
        states = [self._state(), self._state()]

        def call(checkpointer: Any) -> list[Any]:
            responses = [
                checkpointer.save_async(number, state, overwrite=True, force=True)
                for number, state in zip((step, other), states, strict=True)
            ]
            return [response.result() for response in responses]

        self.pair.same(call)
        self._allow_for_differences(other)

    def _allow_for_differences(self, step: int, *, replaced_in_vain: bool = False) -> None:
        """Undoes what Waystation does on purpose not do."""
        if replaced_in_vain:
            # Orbax has deleted it before it asked the policy; here it stays until another one is there.
            assert step in self.pair.listed()
            assert self.pair.own.delete(step)
        if not self.pair.other.checkpoints and self.pair.own.checkpoints:
            # The policy keeps nothing; here the only good checkpoint stays all the same.
            assert len(self.pair.own.checkpoints) == 1
            assert self.pair.own.delete(self.pair.own.latest)

    # ---- looks ---------------------------------------------------------------------------------

    @rule(step=steps)
    def should_save(self, step: int) -> None:
        self.pair.same(lambda checkpointer: bool(checkpointer.should_save(step)))

    @rule(step=st.one_of(st.none(), steps), name=st.sampled_from(["state", "extra", "absent"]))
    def load(self, step: int | None, name: str) -> None:
        def call(checkpointer: Any) -> Any:
            loaded = checkpointer.load(step, checkpointable_name=name)
            return {key: np.asarray(value).tolist() for key, value in loaded.items()}

        self.pair.same(call)

    @rule(step=st.one_of(st.none(), steps), wanted=st.sampled_from([None, {"extra": None}]))
    def load_several(self, step: int | None, wanted: dict[str, Any] | None) -> None:
        self.pair.same(lambda checkpointer: sorted(checkpointer.load_checkpointables(step, wanted)))

    @rule(step=st.one_of(st.none(), steps))
    def look(self, step: int | None) -> None:
        def call(checkpointer: Any) -> Any:
            found = checkpointer.checkpointables_metadata(step)
            return found.step, found.metrics, found.custom_metadata, sorted(found.metadata)

        self.pair.same(call)
        self.pair.same(lambda checkpointer: sorted(checkpointer.metadata(step).metadata))

    # ---- removals ------------------------------------------------------------------------------

    @rule(step=steps, name=names, missing_ok=st.booleans(), later=st.booleans())
    def delete(self, step: int, name: str | None, missing_ok: bool, later: bool) -> None:
        def call(checkpointer: Any) -> Any:
            options = {"checkpointable_name": name, "missing_ok": missing_ok}
            if later:
                return checkpointer.delete_async(step, **options).result()
            return checkpointer.delete(step, **options)

        self.pair.same(call)

    @rule(step=st.one_of(st.none(), steps))
    def cancel(self, step: int | None) -> None:
        self.pair.same(lambda checkpointer: checkpointer.cancel(step))

    # ---- others, and again ---------------------------------------------------------------------

    @rule(step=steps)
    def another_program_removes_a_step(self, step: int) -> None:
        self.pair.remove_behind(step)
        self.pair.require_same_state()  # neither has looked
        self.pair.same(lambda checkpointer: checkpointer.reload())

    @rule(step=steps)
    def another_program_saves_a_step(self, step: int) -> None:
        state = self._state()
        with self.pair.behind() as same:
            same(lambda checkpointer: checkpointer.save(step, state, force=True))
        self.pair.same(lambda checkpointer: checkpointer.reload())
        self._allow_for_differences(step)

    @rule()
    def open_again(self) -> None:
        self.pair.close()
        self.pair.open()

    @rule(what=st.sampled_from(sorted(WRONG)))
    def call_wrongly(self, what: str) -> None:
        outcome = self.pair.same(WRONG[what])
        assert isinstance(outcome, type), f"Orbax accepts {what}"
        assert issubclass(outcome, Exception)

    @invariant()
    def both_have_the_same(self) -> None:
        if self._pair is not None:
            self._pair.require_same_state()


TestSameCalls = SameCalls.TestCase
# Sequences are short, and their calls slow: one that fails is shown as it was found.
TestSameCalls.settings = settings(
    max_examples=amount(6, 240), stateful_step_count=14, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
