"""Preservation policies keep what those of genuine Orbax keep."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training import oracle

from waystation import errors
from waystation.training import preservation_policies as ours

theirs = oracle.training.preservation_policies

counts = st.one_of(st.none(), st.integers(0, 5))
metrics = st.one_of(st.none(), st.fixed_dictionaries({"loss": st.floats(0, 3).map(lambda x: round(x, 1))}))


@st.composite
def sequences(draw: st.DrawFn) -> list[oracle.Step]:
    gaps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40), metrics), max_size=12))
    steps, step, seconds = [], -1, 0
    for more_steps, more_seconds, found in gaps:
        step, seconds = step + more_steps, seconds + more_seconds
        steps.append(oracle.at(step, seconds, found))
    # A program may go back to an earlier step: the last one is the one that was saved last.
    return draw(st.one_of(st.just(steps), st.permutations(steps)))


def both(name: str, **arguments: Any) -> tuple[Any, Any]:
    return getattr(ours, name)(**arguments), getattr(theirs, name)(**arguments)


def loss(found: dict[str, float]) -> float:
    return found["loss"]


simple = st.one_of(
    st.just(both("PreserveAll")),
    st.one_of(st.none(), st.integers(0, 6)).map(lambda n: both("LatestN", n=n)),
    st.integers(0, 100).map(lambda secs: both("EveryNSeconds", interval_secs=secs)),
    st.builds(
        lambda steps, exact, most: both(
            "EveryNSteps", interval_steps=steps, exact_interval=exact, max_to_keep=most
        ),
        st.integers(1, 12),
        st.booleans(),
        counts,
    ),
    st.builds(
        lambda steps, most: both("EveryNStepsClosest", interval_steps=steps, max_to_keep=most),
        st.integers(1, 12),
        counts,
    ),
    st.lists(st.integers(0, 60)).map(lambda steps: both("CustomSteps", steps=steps)),
    st.builds(
        lambda reverse, n, others: both(
            "BestN", get_metric_fn=loss, reverse=reverse, n=n, keep_checkpoints_without_metrics=others
        ),
        st.booleans(),
        st.one_of(st.none(), st.integers(0, 5)),
        st.booleans(),
    ),
)
composed = st.lists(simple, min_size=1, max_size=3).map(
    lambda found: (
        ours.AnyPreservationPolicy([own for own, _ in found]),
        theirs.AnyPreservationPolicy([other for _, other in found]),
    )
)


@given(st.one_of(simple, composed), sequences())
def test_policies_keep_what_orbax_keeps(pair: tuple[Any, Any], steps: list[oracle.Step]) -> None:
    own, other = pair
    wanted = oracle.preserved(other, theirs.PreservationContext(), steps)
    assert oracle.preserved(own, ours.PreservationContext(), steps) == wanted


@given(st.lists(st.integers(0, 100), max_size=6), st.integers(0, 100))
def test_durations_keep_what_orbax_keeps(hours: list[int], most: int) -> None:
    now = datetime.datetime.now(tz=datetime.UTC)
    ages = [datetime.timedelta(hours=hour) for hour in sorted(hours, reverse=True)]
    steps = [oracle.Step(step, now - age) for step, age in enumerate(ages)]
    # Half an hour away from every age, so that the time between two looks at the clock does not matter.
    own, other = both("LatestDuration", duration=datetime.timedelta(hours=most + 0.5))
    wanted = oracle.preserved(other, theirs.PreservationContext(), steps)
    assert oracle.preserved(own, ours.PreservationContext(), steps) == wanted


@pytest.mark.parametrize("name", ours.__all__)
def test_orbax_has_the_same_names(name: str) -> None:
    assert hasattr(theirs, name)


@pytest.mark.parametrize("name", ["EveryNSteps", "EveryNStepsClosest"])
def test_an_interval_of_no_steps_is_the_error_that_it_is_in_orbax(name: str) -> None:
    own, other = both(name, interval_steps=0)
    steps = [oracle.at(1, 1)]
    with pytest.raises(ValueError, match="interval_steps"):
        other.should_preserve(steps, context=theirs.PreservationContext())
    with pytest.raises(errors.InvalidInput, match="interval_steps"):
        own.should_preserve(steps, context=ours.PreservationContext())


@pytest.mark.parametrize(
    "policy",
    [
        lambda: ours.LatestN(-1),
        lambda: ours.EveryNSteps(1, max_to_keep=-1),
        lambda: ours.EveryNStepsClosest(1, max_to_keep=-1),
        lambda: ours.BestN(get_metric_fn=loss, n=-1),
    ],
)
def test_a_negative_number_of_checkpoints_is_refused(policy: Callable[[], Any]) -> None:
    with pytest.raises(errors.InvalidInput, match="negative"):
        policy()


def test_a_loss_that_is_not_a_number_is_the_worst() -> None:
    values = [math.nan, 0.5, 0.1, math.nan]
    steps = [oracle.at(step, step, {"loss": value}) for step, value in enumerate(values)]
    for reverse in (False, True):
        policy = ours.BestN(get_metric_fn=loss, reverse=reverse, n=2)
        kept = oracle.preserved(policy, ours.PreservationContext(), steps)
        assert kept == [False, True, True, False]


def test_no_policy_at_all_keeps_nothing() -> None:
    policy = ours.AnyPreservationPolicy([])
    assert oracle.preserved(policy, ours.PreservationContext(), [oracle.at(1, 1)]) == [False]
