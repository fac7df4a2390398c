"""The interval that is derived from costs and failures is the one that makes programs end soonest."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import errors
from waystation.training.adaptive_interval import (
    AdaptiveInterval,
    daly_interval,
    expected_seconds,
    young_interval,
)
from waystation.training.costs import SaveCost, SaveCosts
from waystation.training.save_decision_policies import AdaptiveIntervalPolicy, DecisionContext

# What a save costs, as a share of the mean time between failures.
RATIOS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0, 1.9)


def best_interval(cost_s: float, mean_s: float) -> float:
    """The minimum of the expected time, by golden-section search: a numeric optimum without any formula."""
    shrink = (math.sqrt(5) - 1) / 2
    low, high = mean_s * 1e-6, mean_s * 4
    for _ in range(200):
        left, right = high - shrink * (high - low), low + shrink * (high - low)
        if expected_seconds(left, cost_s, mean_s) < expected_seconds(right, cost_s, mean_s):
            high = right
        else:
            low = left
    return (low + high) / 2


def overhead(interval_s: float, cost_s: float, mean_s: float) -> float:
    return expected_seconds(interval_s, cost_s, mean_s) - 1


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_higher_order_formula_is_all_but_optimal(ratio: float) -> None:
    mean_s = 3600.0
    cost_s = ratio * mean_s
    least = overhead(best_interval(cost_s, mean_s), cost_s, mean_s)
    assert overhead(daly_interval(cost_s, mean_s), cost_s, mean_s) <= least * 1.01


@pytest.mark.parametrize("ratio", RATIOS)
def test_the_first_order_formula_is_good_where_saves_cost_little(ratio: float) -> None:
    mean_s = 3600.0
    cost_s = ratio * mean_s
    least = overhead(best_interval(cost_s, mean_s), cost_s, mean_s)
    first = overhead(young_interval(cost_s, mean_s), cost_s, mean_s)
    assert first >= overhead(daly_interval(cost_s, mean_s), cost_s, mean_s) * (1 - 1e-9)
    if ratio <= 1e-2:
        assert first <= least * 1.01


def simulated_seconds(interval_s: float, cost_s: float, mean_s: float, work_s: float, seed: int) -> float:
    """How long a program takes that saves at an interval, and whose failures come at random."""
    failures = random.Random(seed)
    elapsed_s = done_s = 0.0
    next_failure_s = failures.expovariate(1 / mean_s)
    while done_s < work_s:
        segment_s = interval_s + cost_s
        if elapsed_s + segment_s <= next_failure_s:
            elapsed_s += segment_s
            done_s += interval_s
        else:
            elapsed_s = next_failure_s  # everything since the last save is lost
            next_failure_s = elapsed_s + failures.expovariate(1 / mean_s)
    return elapsed_s


@pytest.mark.parametrize(("cost_s", "mean_s"), [(10.0, 3600.0), (120.0, 3600.0)])
def test_in_a_simulation_other_intervals_take_longer(cost_s: float, mean_s: float) -> None:
    work_s = 3000 * mean_s  # some thousand failures
    interval = AdaptiveInterval(mean_time_between_failures_s=mean_s)
    chosen_s = interval.seconds(SaveCost(cost_s, 0.0))
    took = {
        factor: simulated_seconds(chosen_s * factor, cost_s, mean_s, work_s, seed=4) / work_s
        for factor in (0.25, 1.0, 4.0)
    }
    assert took[1.0] < took[0.25]
    assert took[1.0] < took[4.0]
    assert took[1.0] == pytest.approx(expected_seconds(chosen_s, cost_s, mean_s), rel=0.01)


def test_saves_never_take_more_than_their_share() -> None:
    cost = SaveCost(blocking_s=30.0, background_s=0.0)
    free = AdaptiveInterval(mean_time_between_failures_s=600.0)
    capped = AdaptiveInterval(mean_time_between_failures_s=600.0, overhead_limit=0.05)
    assert 30.0 / (30.0 + free.seconds(cost)) > 0.05, "or the limit would show nothing"
    assert 30.0 / (30.0 + capped.seconds(cost)) == pytest.approx(0.05)


def test_what_goes_on_in_the_background_costs_what_it_slows_down() -> None:
    cost = SaveCost(blocking_s=1.0, background_s=20.0)
    unnoticed = AdaptiveInterval(mean_time_between_failures_s=86400.0)
    felt = AdaptiveInterval(mean_time_between_failures_s=86400.0, background_weight=0.5)
    assert unnoticed.seconds(cost) == daly_interval(1.0, 86400.0)
    assert felt.seconds(cost) == daly_interval(11.0, 86400.0)


@given(st.floats(0, 100), st.floats(0, 1000), st.floats(1, 1e6))
def test_no_interval_is_shorter_than_what_a_save_takes(
    blocking_s: float, background_s: float, mean_s: float
) -> None:
    interval = AdaptiveInterval(mean_time_between_failures_s=mean_s, minimum_interval_s=3.0)
    assert interval.seconds(SaveCost(blocking_s, background_s)) >= max(3.0, background_s)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean_time_between_failures_s": 0.0},
        {"mean_time_between_failures_s": math.nan},
        {"mean_time_between_failures_s": 1.0, "overhead_limit": 1.0},
        {"mean_time_between_failures_s": 1.0, "background_weight": 1.5},
        {"mean_time_between_failures_s": 1.0, "minimum_interval_s": -1.0},
        {"mean_time_between_failures_s": 1.0, "formula": "best"},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(errors.InvalidInput):
        AdaptiveInterval(**wrong)  # type: ignore[arg-type]


def context(cost: SaveCost | None, since_s: float | None, *, in_progress: bool = False) -> DecisionContext:
    return DecisionContext(
        is_saving_in_progress=in_progress,
        reached_preemption=False,
        multiprocessing_options=None,
        save_cost=cost,
        since_last_save_s=since_s,
    )


def test_the_policy_saves_at_once_to_learn_the_cost_and_then_at_the_interval() -> None:
    policy = AdaptiveIntervalPolicy(AdaptiveInterval(mean_time_between_failures_s=3600.0))
    cost = SaveCost(2.0, 0.0)
    interval_s = daly_interval(2.0, 3600.0)

    def decides(given: DecisionContext) -> bool:
        return policy.should_save(None, [], context=given)  # type: ignore[arg-type]

    assert decides(context(None, None))
    assert not decides(context(None, 1e6)), "the first save has not ended, so nobody knows what it costs"
    assert not decides(context(cost, interval_s - 0.1))
    assert decides(context(cost, interval_s))
    assert not decides(context(cost, interval_s, in_progress=True))


def test_each_tier_has_costs_and_failures_of_its_own() -> None:
    memory = AdaptiveIntervalPolicy(
        AdaptiveInterval(mean_time_between_failures_s=3600.0), cost=SaveCost(0.01, 0.0)
    )
    disk = AdaptiveIntervalPolicy(AdaptiveInterval(mean_time_between_failures_s=86400.0))
    asked = context(SaveCost(20.0, 0.0), 60.0)
    assert memory.should_save(None, [], context=asked)  # type: ignore[arg-type]
    assert not disk.should_save(None, [], context=asked)  # type: ignore[arg-type]


def test_an_estimate_is_not_misled_by_one_slow_save() -> None:
    costs = SaveCosts()
    assert costs.estimate() is None
    for blocking_s in (30.0, 1.0, 1.2, 0.9):
        costs.record(SaveCost(blocking_s, 2.0))
    found = costs.estimate()
    assert found is not None
    assert found.blocking_s == pytest.approx(1.1)
    assert found.background_s == 2.0
