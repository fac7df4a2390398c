"""Closed formulas for what the simulation counts, where there are any: its tests compare."""

from __future__ import annotations

import math


def wasted_s(checkpoint_s: float, interval_s: float, retrieval_s: float) -> float:
    """GEMINI's cost of a failure, if failures are rare: a save that began too late to count, half an
    interval, and the way back."""
    return checkpoint_s + interval_s / 2 + retrieval_s


def expected_loss_s(failures_per_s: float, first_s: float, interval_s: float, commit_s: float) -> float:
    """The work that a failure takes, on average, however often they come.

    Work begins at a version that is safe; saves begin after `first_s` and then at every interval, and count
    `commit_s` later. The time of the failure is exponentially distributed; what is lost is the time since the
    begin of the newest save that counts.
    """
    first = first_s * math.exp(-failures_per_s * (first_s + commit_s))
    later = math.exp(-failures_per_s * (first_s + interval_s + commit_s))
    return 1 / failures_per_s - first - interval_s * later / -math.expm1(-failures_per_s * interval_s)


def store_share_of_two_hosts(failures_per_s: float, first_s: float, commit_s: float) -> float:
    """The share of recoveries from the store, of two hosts that keep each other's shards and fail one by one.

    Until a new version counts, the host that failed has no copy of the last: a failure of the other one then
    loses it. With `u` the probability that a failure comes before that, of recoveries that leave no version
    in memory a share of `u` is followed by another, of those that leave one host without its copies `u / 2`.
    """
    too_early = -math.expm1(-failures_per_s * (first_s + commit_s))
    return too_early / (2 - too_early)
