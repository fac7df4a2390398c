"""Who is stuck: decided from what hosts report, without Ray, clocks or threads.

JAX waits for a collective for ever when one of its processes does not come. So each host says for how long it
has had something to do without any of it ending, and a host that does not even answer is as good as dead.
Only time in which a host could go on counts: not while it, or another of its island that it may wait for,
waits for a block of another island that is still at work.

Why nothing waits for ever: a block that its sender says it has sent is waited for no longer than the
deadline; a sender that does not go on is found on its own island; and hosts that wait for each other in a
circle are not taken for waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from waystation.runtime.hosts.lane import Report

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
        front: The place of the first message that it has not ended.
        owes: Whether it was told something that it has not ended.
    """

    report: Report | None
    front: int = 0
    owes: bool = False


def interval_s(deadline_s: float) -> float:
    """How often hosts are asked, in seconds."""
    return min(1.0, deadline_s / 4)


class Watchdog:
    """Watches the hosts of one gang.

    Args:
        deadline_s: The deadline of the island, in seconds.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._forgiven: dict[
            str, tuple[int, float]
        ] = {}  # how much of what a host has stalled, by what ended
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
        reports = {
            host: self._counted(host, seen.report, is_excused=first is not None and seen.front >= first)
            for host, seen in hosts.items()
        }
        busy = {host for host, seen in hosts.items() if seen.report is not None and seen.report.stalled_s > 0}
        return find_stuck(reports, self._deadline_s, busy) or self._find_deaf(hosts)

    def _counted(self, host: str, report: Report | None, *, is_excused: bool) -> Report | None:
        """What a host has reported, without the time that does not count."""
        if report is None:
            return None
        if is_excused:
            self._forgiven[host] = report.ended, report.stalled_s
        ended, forgiven_s = self._forgiven.get(host, (report.ended, 0.0))
        if ended != report.ended or report.stalled_s < forgiven_s:  # it has gone on since
            self._forgiven.pop(host, None)
            return report
        return replace(report, stalled_s=report.stalled_s - forgiven_s)

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
    reports: Mapping[str, Report | None], deadline_s: float, busy: Collection[str] = ()
) -> Stuck | None:
    """The host that holds up its island, if one does.

    Of hosts that wait for each other, the one that is least far is held up by nobody: the others wait for it.

    Args:
        reports: What each host has said; None for one that has said nothing until the deadline.
        deadline_s: The deadline of the island, in seconds.
        busy: Those that have something to do. One that is least far, busy, and not stalled for so long, goes
            on.
    """
    for host, report in reports.items():
        if report is None:
            return Stuck(host, f"has not answered for {deadline_s:g} s: its process is stopped or hangs")
    known = {host: report for host, report in reports.items() if report is not None}
    limit_s = deadline_s - interval_s(deadline_s)
    stalled = {host: report for host, report in known.items() if report.stalled_s >= limit_s}
    if not stalled:
        return None
    waiting = min(stalled, key=lambda host: stalled[host].begun)
    least = min(known, key=lambda host: (known[host].begun, host))
    if known[least].begun < known[waiting].begun:
        if least in busy:
            return None
        doing = known[waiting].doing or "its message"
        return Stuck(least, f"has not begun what '{waiting}' waits in ('{doing}') for {deadline_s:g} s")
    doing = stalled[waiting].doing or "its message"
    return Stuck(waiting, f"has been in '{doing}' for {deadline_s:g} s, and it does not end")
