"""Who is called stuck, from what hosts report."""

import pytest

from waystation.runtime.cluster.watchdog import Seen, Stuck, Watchdog, find_stuck, interval_s
from waystation.runtime.hosts.execution_queue import Report


def report(
    begun: int,
    ended: int,
    stalled_s: float,
    doing: str = "step",
    awaits: tuple[int, str] | None = None,
    idle_s: float | None = 100.0,
    *,
    is_elsewhere: bool = False,
) -> Report:
    return Report(
        begun,
        ended,
        waiting=0,
        doing=doing,
        stalled_s=stalled_s,
        awaits=awaits,
        idle_s=idle_s,
        is_elsewhere=is_elsewhere,
    )


def seen(told: Report | None, hosts: str = "ab") -> Seen:
    """A host at a work of these hosts, which is the first that it has not ended."""
    return Seen(told, front=0 if told is None else told.ended, owes=True, hosts=frozenset(hosts))


def test_hosts_that_go_on_are_not_stuck() -> None:
    assert find_stuck({"a": seen(report(5, 4, 3.0)), "b": seen(report(4, 4, 0.0))}, deadline_s=8.0) is None


def test_a_host_that_does_not_answer_is_stuck_whatever_the_others_say() -> None:
    stuck = find_stuck({"a": seen(report(5, 4, 9.0)), "b": seen(None)}, deadline_s=8.0)
    assert stuck is not None
    assert (stuck.host, stuck.reason) == (
        "b",
        "has not answered for 8 s: its process is stopped or hangs",
    )


def test_of_hosts_that_wait_for_each_other_the_one_that_is_least_far_is_stuck() -> None:
    stuck = find_stuck({"a": seen(report(5, 4, 8.0)), "b": seen(report(4, 4, 0.0, ""))}, deadline_s=8.0)
    assert stuck is not None
    assert (stuck.host, stuck.reason) == ("b", "has not begun what 'a' waits in ('step') for 8 s")


def test_a_host_is_not_waited_for_in_a_work_that_it_has_no_part_in() -> None:
    alone = {"a": seen(report(5, 4, 8.0, idle_s=0.0), "a"), "b": seen(report(4, 4, 0.0, ""))}
    assert find_stuck(alone, deadline_s=8.0) is None


def test_a_computation_is_stuck_when_the_devices_of_all_that_are_at_something_are_idle() -> None:
    idle = seen(report(5, 4, 8.0, idle_s=8.0))
    resting = seen(report(5, 5, 0.0, "", idle_s=0.0))
    stuck = find_stuck({"a": resting, "b": idle}, deadline_s=8.0)
    assert stuck is not None
    assert (stuck.host, stuck.reason) == ("b", "has been in 'step' for 8 s, and its devices do nothing")
    assert find_stuck({"a": seen(report(5, 4, 8.0, idle_s=0.5)), "b": idle}, deadline_s=8.0) is None


@pytest.mark.parametrize(
    "merely_long",
    [
        report(5, 4, 1e6, idle_s=0.0),  # it computes
        report(5, 4, 1e6, idle_s=None),  # on an accelerator, which computes by itself
        report(5, 4, 1e6, is_elsewhere=True),  # a function of Python, which may wait for anything
    ],
)
def test_what_is_merely_long_is_stuck_by_the_limit_of_the_island_only(merely_long: Report) -> None:
    hosts = {"a": seen(merely_long), "b": seen(merely_long)}
    assert find_stuck(hosts, deadline_s=8.0) is None
    assert find_stuck(hosts, deadline_s=8.0, computation_limit_s=2e6) is None
    stuck = find_stuck(hosts, deadline_s=8.0, computation_limit_s=1e5)
    assert stuck == Stuck("a", "has been in 'step' for 100000 s, the limit of computations of its island")


@pytest.mark.parametrize("deadline_s", [0.4, 8.0, 3600.0])
def test_a_stuck_host_is_found_within_the_deadline(deadline_s: float) -> None:
    # It reports just before the limit, and is asked again an interval later.
    missed = deadline_s - interval_s(deadline_s)
    assert find_stuck({"a": seen(report(1, 0, missed * 0.99, idle_s=missed))}, deadline_s) is None
    assert find_stuck({"a": seen(report(1, 0, missed, idle_s=missed))}, deadline_s) is not None
    assert missed + interval_s(deadline_s) <= deadline_s


def test_the_one_that_is_least_far_is_not_stuck_while_it_goes_on() -> None:
    waiting = seen(report(5, 4, 8.0))
    assert find_stuck({"a": waiting, "b": seen(report(4, 3, 1.0, idle_s=0.0))}, deadline_s=8.0) is None
    assert find_stuck({"a": waiting, "b": seen(report(4, 3, 8.0, idle_s=0.0))}, deadline_s=8.0) is None
    stuck = find_stuck({"a": waiting, "b": seen(report(4, 3, 8.0, is_elsewhere=True))}, deadline_s=8.0)
    assert stuck == Stuck("b", "has not begun what 'a' waits in ('step') for 8 s")


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


def meeting(stalled_s: float) -> dict[str, Seen]:
    return {name: Seen(report(5, 4, stalled_s), front=4, owes=True) for name in ("left/0", "left/1")}


def test_time_in_which_a_host_waits_for_another_island_does_not_count() -> None:
    polls = [waiting(5.0), waiting(9.0), waiting(100.0), meeting(101.0), meeting(106.0), meeting(107.5)]
    *before, last = watched(True, *polls)
    assert before == [None] * 5
    assert last == Stuck("left/0", "has been in 'step' for 8 s, and its devices do nothing")


def test_it_counts_once_there_is_nobody_who_would_send() -> None:
    assert watched(False, waiting(5.0), waiting(7.5))[-1] == Stuck(
        "left/0", "has been in 'step' for 8 s, and its devices do nothing"
    )


def test_a_host_that_is_not_as_far_as_the_one_that_waits_has_no_excuse() -> None:
    hosts = waiting(9.0) | {"left/1": Seen(report(5, 3, 9.0), front=3, owes=True)}
    assert watched(True, hosts) == [Stuck("left/1", "has been in 'step' for 8 s, and its devices do nothing")]


def test_what_has_ended_meanwhile_begins_a_new_count() -> None:
    later = {name: Seen(report(6, 5, 7.5), front=5, owes=True) for name in ("left/0", "left/1")}
    compiled = meeting(3.0)  # progress without an end
    assert watched(True, waiting(100.0), compiled)[-1] is None
    assert watched(True, waiting(100.0), compiled, meeting(7.5))[-1] is not None
    assert watched(True, waiting(100.0), later)[-1] is not None


def test_a_host_that_has_not_heard_what_it_was_told_is_found() -> None:
    deaf = {"left/0": Seen(report(4, 4, 0.0, ""), front=4, owes=True)}
    polls = [deaf] * 10
    stuck = Stuck("left/0", "has not begun what it was told 8 s ago")
    assert watched(True, *polls)[7:] == [None, stuck, stuck]
    at_rest = {"left/0": Seen(report(4, 4, 0.0, ""), front=4, owes=False)}
    assert watched(True, *polls[:7], at_rest, *polls[:7]) == [None] * 15


def test_transfers_that_go_on_are_not_what_a_host_has_not_heard() -> None:
    moving = {"left/0": Seen(report(4, 3, 0.0, ""), front=4, owes=False)}
    assert watched(True, *[moving] * 30) == [None] * 30
