"""Who is stuck: decided from what hosts report, without Ray, clocks or threads.

JAX waits for a collective for ever when one of its processes does not come. So each host says for how long it
has had something to do without any of it ending, and a host that does not even answer is as good as dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from waystation.runtime.hosts.lane import Report


@dataclass(frozen=True, slots=True)
class Stuck:
    """A host that counts as dead.

    Attributes:
        host: Which.
        reason: Why, to go on after its name.
    """

    host: str
    reason: str


def interval_s(deadline_s: float) -> float:
    """How often hosts are asked, in seconds."""
    return min(1.0, deadline_s / 4)


def find_stuck(reports: Mapping[str, Report | None], deadline_s: float) -> Stuck | None:
    """The host that holds up its island, if one does.

    Of hosts that wait for each other, the one that is least far is held up by nobody: the others wait for it.

    Args:
        reports: What each host has said; None for one that has said nothing until the deadline.
        deadline_s: The deadline of the island, in seconds.
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
        doing = known[waiting].doing or "its message"
        return Stuck(least, f"has not begun what '{waiting}' waits in ('{doing}') for {deadline_s:g} s")
    doing = stalled[waiting].doing or "its message"
    return Stuck(waiting, f"has been in '{doing}' for {deadline_s:g} s, and it does not end")
