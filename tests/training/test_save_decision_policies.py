"""Save-decision policies say what those of genuine Orbax say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training import oracle

from waystation import errors
from waystation.training import save_decision_policies as ours

theirs = oracle.training.save_decision_policies
OPTIONS = oracle.ocp.options.MultiprocessingOptions().v0()


@st.composite
def histories(draw: st.DrawFn) -> list[oracle.Step]:
    """Steps that were saved, ascending, and last the present one."""
    gaps = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 40)), min_size=1, max_size=8))
    steps, step, seconds = [], -1, 0
    for more_steps, more_seconds in gaps:
        step, seconds = step + more_steps, seconds + more_seconds
        steps.append(oracle.at(step, seconds))
    return steps


def pairs() -> st.SearchStrategy[tuple[Any, Any]]:
    """The same policy in both libraries."""
    simple = st.one_of(
        st.integers(1, 6).map(lambda n: (ours.FixedIntervalPolicy(n), theirs.FixedIntervalPolicy(n))),
        st.sets(st.integers(0, 40)).map(
            lambda steps: (ours.SpecificStepsPolicy(steps), theirs.SpecificStepsPolicy(steps))
        ),
        st.none().map(
            lambda _: (ours.PreemptionCheckpointingPolicy(), theirs.PreemptionCheckpointingPolicy())
        ),
        st.none().map(lambda _: (ours.InitialSavePolicy(), theirs.InitialSavePolicy())),
        st.one_of(st.none(), st.integers(0, 60)).map(
            lambda s: (
                ours.ContinuousCheckpointingPolicy(s),
                theirs.ContinuousCheckpointingPolicy(minimum_interval_secs=s),
            )
        ),
    )
    several = st.lists(simple, max_size=3).map(
        lambda found: (
            ours.AnySavePolicy([own for own, _ in found]),
            theirs.AnySavePolicy([other for _, other in found]),
        )
    )
    return st.one_of(simple, several)


@given(pairs(), histories(), st.booleans(), st.booleans())
def test_policies_decide_as_orbax_does(
    pair: tuple[Any, Any], history: list[oracle.Step], in_progress: bool, preempted: bool
) -> None:
    own, other = pair
    *previous, present = history
    flags = {"is_saving_in_progress": in_progress, "reached_preemption": preempted}
    wanted = other.should_save(
        present, previous, context=theirs.DecisionContext(**flags, multiprocessing_options=OPTIONS)
    )
    context = ours.DecisionContext(**flags, multiprocessing_options=OPTIONS)
    assert own.should_save(present, previous, context=context) == wanted


@pytest.mark.parametrize(
    "name", sorted(set(ours.__all__) - {"AdaptiveInterval", "AdaptiveIntervalPolicy", "SaveCost"})
)
def test_orbax_has_the_same_names(name: str) -> None:
    assert hasattr(theirs, name)


def test_every_policy_is_one_by_the_protocol_of_both() -> None:
    for policy in (ours.InitialSavePolicy(), ours.FixedIntervalPolicy(3), ours.AnySavePolicy([])):
        assert isinstance(policy, ours.SaveDecisionPolicy)
        assert isinstance(policy, theirs.SaveDecisionPolicy)


def test_an_interval_of_no_steps_is_refused() -> None:
    with pytest.raises(errors.InvalidInput, match="interval of 0 steps"):
        ours.FixedIntervalPolicy(0)


def test_what_is_the_same_everywhere_is_known_of_compositions() -> None:
    same = [ours.FixedIntervalPolicy(2), ours.PreemptionCheckpointingPolicy()]
    assert ours.is_same_everywhere(ours.AnySavePolicy(same))
    assert not ours.is_same_everywhere(ours.AnySavePolicy([*same, ours.ContinuousCheckpointingPolicy()]))
    assert not ours.is_same_everywhere(ours.InitialSavePolicy())
