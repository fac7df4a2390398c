"""Who is called stuck, from what hosts report."""

import pytest

from waystation.runtime.cluster.watchdog import Seen, Stuck, Watchdog, find_stuck, interval_s
from waystation.runtime.hosts.lane import Report


def report(
    begun: int, ended: int, stalled_s: float, doing: str = "step", awaits: tuple[int, str] | None = None
) -> Report:
    return Report(begun, ended, waiting=0, doing=doing, stalled_s=stalled_s, awaits=awaits)


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


def test_the_one_that_is_least_far_is_not_stuck_while_it_goes_on() -> None:
    reports = {"a": report(5, 4, 8.0), "b": report(4, 3, 1.0)}
    assert find_stuck(reports, deadline_s=8.0, busy={"a", "b"}) is None


# ---- what waits for another island -------------------------------------------------------------

DEADLINE_S = 8.0
AWAITED = 7, "right/0"


def watched(goes_on: bool, *polls: dict[str, Seen]) -> list[Stuck | None]:
    watchdog = Watchdog(DEADLINE_S)
    return [watchdog.judge(hosts, lambda awaited: goes_on and awaited == AWAITED) for hosts in polls]


def waiting(stalled_s: float) -> dict[str, Seen]:
    """One host waits for a block of another island, the other one in a collective for that one."""
    return {
        "left/0": Seen(report(5, 4, stalled_s, awaits=AWAITED), front=4, owes=True),
        "left/1": Seen(report(5, 4, stalled_s), front=4, owes=True),
    }


def computing(stalled_s: float) -> dict[str, Seen]:
    return {name: Seen(report(5, 4, stalled_s), front=4, owes=True) for name in ("left/0", "left/1")}


def test_time_in_which_a_host_waits_for_another_island_does_not_count() -> None:
    polls = [waiting(5.0), waiting(9.0), waiting(100.0), computing(101.0), computing(106.0), computing(107.5)]
    *before, last = watched(True, *polls)
    assert before == [None] * 5
    assert last == Stuck("left/0", "has been in 'step' for 8 s, and it does not end")


def test_it_counts_once_there_is_nobody_who_would_send() -> None:
    assert watched(False, waiting(5.0), waiting(7.5))[-1] == Stuck(
        "left/0", "has been in 'step' for 8 s, and it does not end"
    )


def test_a_host_that_is_not_as_far_as_the_one_that_waits_has_no_excuse() -> None:
    hosts = waiting(9.0) | {"left/1": Seen(report(5, 3, 9.0), front=3, owes=True)}
    assert watched(True, hosts) == [Stuck("left/1", "has been in 'step' for 8 s, and it does not end")]


def test_what_has_ended_meanwhile_begins_a_new_count() -> None:
    later = {name: Seen(report(6, 5, 7.5), front=5, owes=True) for name in ("left/0", "left/1")}
    compiled = computing(3.0)  # progress without an end
    assert watched(True, waiting(100.0), compiled)[-1] is None
    assert watched(True, waiting(100.0), compiled, computing(7.5))[-1] is not None
    assert watched(True, waiting(100.0), later)[-1] is not None


def test_a_host_that_has_not_heard_what_it_was_told_is_found() -> None:
    deaf = {"left/0": Seen(report(4, 4, 0.0, ""), front=4, owes=True)}
    polls = [deaf] * 10
    stuck = Stuck("left/0", "has not begun what it was told 8 s ago")
    assert watched(True, *polls)[7:] == [None, stuck, stuck]
    at_rest = {"left/0": Seen(report(4, 4, 0.0, ""), front=4, owes=False)}
    assert watched(True, *polls[:7], at_rest, *polls[:7]) == [None] * 15
