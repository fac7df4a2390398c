"""Who is called stuck, from what hosts report."""

import pytest

from waystation.runtime.cluster.watchdog import find_stuck, interval_s
from waystation.runtime.hosts.lane import Report


def report(begun: int, ended: int, stalled_s: float, doing: str = "step") -> Report:
    return Report(begun=begun, ended=ended, waiting=0, doing=doing, stalled_s=stalled_s)


def test_hosts_that_go_on_are_not_stuck() -> None:
    assert find_stuck({"a": report(5, 4, 3.0), "b": report(4, 4, 0.0)}, deadline_s=8.0) is None


def test_a_host_that_does_not_answer_is_stuck_whatever_the_others_say() -> None:
    stuck = find_stuck({"a": report(5, 4, 9.0), "b": None}, deadline_s=8.0)
    assert stuck is not None
    assert (stuck.host, stuck.reason) == (
        "b",
        "has not answered for 8 s: its process is stopped or hangs",
    )


def test_of_hosts_that_wait_for_each_other_the_one_that_is_least_far_is_stuck() -> None:
    stuck = find_stuck({"a": report(5, 4, 8.0), "b": report(4, 4, 0.0, "")}, deadline_s=8.0)
    assert stuck is not None
    assert (stuck.host, stuck.reason) == ("b", "has not begun what 'a' waits in ('step') for 8 s")


def test_a_host_that_is_as_far_as_the_others_is_stuck_itself() -> None:
    stuck = find_stuck({"a": report(5, 5, 0.0, ""), "b": report(5, 4, 8.0)}, deadline_s=8.0)
    assert stuck is not None
    assert (stuck.host, stuck.reason) == ("b", "has been in 'step' for 8 s, and it does not end")


@pytest.mark.parametrize("deadline_s", [0.4, 8.0, 3600.0])
def test_a_stuck_host_is_found_within_the_deadline(deadline_s: float) -> None:
    # It reports just before the limit, and is asked again an interval later.
    missed = deadline_s - interval_s(deadline_s)
    assert find_stuck({"a": report(1, 0, missed * 0.99)}, deadline_s) is None
    assert find_stuck({"a": report(1, 0, missed)}, deadline_s) is not None
    assert missed + interval_s(deadline_s) <= deadline_s
