"""Shares of device time while programs compete: only then is it divided, else who has work has all of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from waystation.runtime.timeline.timeline import Timeline

Interval = tuple[int, int]


def competing(timeline: Timeline, island: str, clients: Sequence[str]) -> list[Interval]:
    """When all of some clients had computations on an island that were asked for and had not ended, as
    beginnings and ends in nanoseconds, in order."""
    computing = {each.work for each in timeline.computations if each.host.rpartition("/")[0] == island}
    works: dict[str, list[Interval]] = defaultdict(list)
    for number in computing:
        work = timeline.works.get(number)
        if work is not None and work.submitted_ns is not None and work.completed_ns is not None:
            works[work.client].append((work.submitted_ns, work.completed_ns))
    found: list[Interval] | None = None
    for client in clients:
        own = _joined(works[client])
        found = own if found is None else _both(found, own)
    return found or []


def competing_shares(timeline: Timeline, island: str, clients: Sequence[str]) -> dict[str, float]:
    """Which part of the device time of an island each of some clients had while all of them competed for it;
    they add up to 1. Empty if they never did."""
    intervals = competing(timeline, island, clients)
    taken = dict.fromkeys(clients, 0)
    for each in timeline.computations:
        if each.client in taken and each.host.rpartition("/")[0] == island:
            within = _both([(each.begin_ns, each.end_ns)], intervals)
            taken[each.client] += sum(end - begin for begin, end in within)
    whole = sum(taken.values())
    return {client: time / whole for client, time in taken.items()} if whole else {}


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _both(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Where two orders of intervals, each without overlaps, overlap."""
    found: list[Interval] = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin = max(one[first][0], other[second][0])
        end = min(one[first][1], other[second][1])
        if begin < end:
            found.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return found
