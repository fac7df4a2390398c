"""Which host is stuck: decided from what hosts report, without Ray, clocks or threads.

JAX waits for a collective for ever when one of its processes does not come. Time alone is no evidence of
that: a computation may take long, and so may a function of Python. A host is stuck where something shows it:

- It does not answer, or it has not begun what it was told and has nothing else to do.
- Other hosts have waited for the deadline in a computation that this host has not begun, and it does nothing:
  its own execution queue has not gone on, and its processors are idle where that can be seen.
- A computation has not ended for the deadline, and the processors of all hosts of the island that have
  something to do have been idle all that time: they wait for each other.
- A computation takes longer than the limit that the user has set for the island.

Transfers between devices and storage are not judged: nothing else waits for them, their rounds have deadlines
of their own, and reports say how many bytes they have moved.

Only time in which a host could go on counts: not while it, or another of its island that it may wait for,
waits for a block of another island that is still at work.

Why nothing waits for ever: a block that its sender says it has sent is waited for no longer than the
deadline; a sender that does not go on is found on its own island; and hosts that wait for each other in a
circle are not taken for waiting. What can hang unseen is a computation on an accelerator, or a function of
Python, that no other host waits for: for these there is the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from waystation.runtime.hosts.execution_queue import Report

Awaited = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Stuck:
    """A host that counts as dead.

    Attributes:
        host: Which.
        reason: Why, to go on after its name.
    """

    host: str
    reason: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A host as it is seen now.

    Attributes:
        report: What it has said, with the place in the order of the island up to which it has begun; None for
            a host that has said nothing until the deadline.
        front: The place of the first message that it has not ended, without transfers.
        owes: Whether it was told something that it has not ended, other than transfers that go on.
        hosts: The hosts that take part in the work of that first message.
    """

    report: Report | None
    front: int = 0
    owes: bool = False
    hosts: frozenset[str] = frozenset()


def interval_s(deadline_s: float) -> float:
    """How often hosts are asked, in seconds."""
    return min(1.0, deadline_s / 4)


class Watchdog:
    """Watches the hosts of one gang.

    Args:
        deadline_s: The deadline of the island, in seconds.
        computation_limit_s: How long a computation may take, in seconds; None for no limit.
    """

    def __init__(self, deadline_s: float, computation_limit_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._computation_limit_s = computation_limit_s
        # How much of what a host has stalled does not count, by how many messages it had ended.
        self._forgiven: dict[str, tuple[int, float]] = {}
        self._deaf: dict[str, tuple[int, int]] = {}  # how often it had nothing to do, and owed something

    def judge(self, hosts: Mapping[str, Seen], goes_on: Callable[[Awaited], bool]) -> Stuck | None:
        """The host that holds up its island, if one does; called once in each interval.

        Args:
            hosts: All of the gang.
            goes_on: Whether a host of another island is yet to send what a work of both waits for, and waits
                itself for nobody here.
        """
        fronts = [
            seen.front
            for seen in hosts.values()
            if seen.report is not None and seen.report.awaits is not None and goes_on(seen.report.awaits)
        ]
        first = min(fronts, default=None)
        counted = {
            host: self._counted(host, seen, is_excused=first is not None and seen.front >= first)
            for host, seen in hosts.items()
        }
        return find_stuck(counted, self._deadline_s, self._computation_limit_s) or self._find_deaf(hosts)

    def _counted(self, host: str, seen: Seen, *, is_excused: bool) -> Seen:
        """A host as it is seen, without the time that does not count."""
        report = seen.report
        if report is None:
            return seen
        if is_excused:
            self._forgiven[host] = report.ended, report.stalled_s
        ended, forgiven_s = self._forgiven.get(host, (report.ended, 0.0))
        if ended != report.ended or report.stalled_s < forgiven_s:  # it has gone on since
            self._forgiven.pop(host, None)
            return seen
        return replace(seen, report=replace(report, stalled_s=report.stalled_s - forgiven_s))

    def _find_deaf(self, hosts: Mapping[str, Seen]) -> Stuck | None:
        """A host that was told something and has nothing to do: it has not heard it."""
        for host, seen in hosts.items():
            if seen.report is None or seen.report.stalled_s > 0 or not seen.owes:
                self._deaf.pop(host, None)
                continue
            ended, times = self._deaf.get(host, (seen.report.ended, 0))
            times = times + 1 if ended == seen.report.ended else 1
            self._deaf[host] = seen.report.ended, times
            if (times - 1) * interval_s(self._deadline_s) >= self._deadline_s:
                return Stuck(host, f"has not begun what it was told {self._deadline_s:g} s ago")
        return None


def find_stuck(
    hosts: Mapping[str, Seen], deadline_s: float, computation_limit_s: float | None = None
) -> Stuck | None:
    """The host that holds up its island, if one does.

    Of hosts that wait for each other, the watchdog blames the one that has advanced least in the order of the
    island: the others wait for it, and it waits for none of them.

    Args:
        hosts: The hosts of the island.
        deadline_s: The deadline of the island, in seconds.
        computation_limit_s: How long a computation may take, in seconds; None for no limit.
    """
    known: dict[str, Report] = {}
    for host, seen in hosts.items():
        if seen.report is None:
            return Stuck(host, f"has not answered for {deadline_s:g} s: its process is stopped or hangs")
        known[host] = seen.report
    limit_s = deadline_s - interval_s(deadline_s)
    stalled = [host for host, report in known.items() if report.stalled_s >= limit_s]
    return (
        _over_limit(known, computation_limit_s)
        or _waited_for(hosts, known, stalled, deadline_s)
        or _idle(known, stalled, deadline_s)
    )


def _over_limit(known: Mapping[str, Report], computation_limit_s: float | None) -> Stuck | None:
    """A host that is at a computation for longer than it may."""
    if computation_limit_s is None:
        return None
    late = [host for host, report in known.items() if report.stalled_s > computation_limit_s]
    if not late:
        return None
    host = min(late, key=lambda each: (known[each].begun, each))
    doing = known[host].doing or "its message"
    return Stuck(
        host, f"has been in '{doing}' for {computation_limit_s:g} s, the limit of computations of its island"
    )


def _waited_for(
    hosts: Mapping[str, Seen], known: Mapping[str, Report], stalled: list[str], deadline_s: float
) -> Stuck | None:
    """A host that has not begun what others wait in, and does nothing."""
    found = [
        (known[other].begun, other, waiting)
        for waiting in stalled
        for other in hosts[waiting].hosts & known.keys()
        if known[other].begun <= hosts[waiting].front < known[waiting].begun
    ]
    if not found:
        return None
    _, least, waiting = min(found)
    report = known[least]
    if report.stalled_s > 0 and (least not in stalled or not _is_idle(report, deadline_s)):
        return None  # it is at something else, and goes on
    doing = known[waiting].doing or "its message"
    return Stuck(least, f"has not begun what '{waiting}' waits in ('{doing}') for {deadline_s:g} s")


def _idle(known: Mapping[str, Report], stalled: list[str], deadline_s: float) -> Stuck | None:
    """A host at a computation that does not go on: all that could bring it on are idle."""
    busy = [report for report in known.values() if report.stalled_s > 0]
    if not stalled or not all(_waits_for_devices(report, deadline_s) for report in busy):
        return None
    host = min(stalled, key=lambda each: (known[each].begun, each))
    doing = known[host].doing or "its message"
    return Stuck(host, f"has been in '{doing}' for {deadline_s:g} s, and its devices do nothing")


def _waits_for_devices(report: Report, deadline_s: float) -> bool:
    return not report.is_elsewhere and report.idle_s is not None and _is_idle(report, deadline_s)


def _is_idle(report: Report, deadline_s: float) -> bool:
    """Whether a host does nothing, as far as can be seen."""
    return report.idle_s is None or report.idle_s >= deadline_s - interval_s(deadline_s)
