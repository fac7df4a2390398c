"""What the machine does during a load, as a process of its own sees it: samples of the kernel's counters.

All figures but memory are the machine's, so that what the kernel does for a load counts as well; nothing else
may run. Memory is what the processes of the program hold. Times are those of the monotonic clock, which
all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.loading_experiments.programs import Beside, Facts, context, device_read_bytes

INTERVAL_S = 0.01
AROUND_S = 0.1
READY_S = 60.0
COLUMNS = ("time_s", "cpu_s", "cached_bytes", "disk_read_bytes", "anonymous_bytes", "mapped_bytes")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_IDLE = (3, 4)  # of the columns of /proc/stat: idle, and waiting for a disk
_COUNTED = 8  # the columns behind count guests, which are in others already

Row = tuple[float, ...]


def sample(process_ids: Sequence[int], path: Path) -> Row:
    """One sample, in the order of `COLUMNS`."""
    ticks = [int(text) for text in _first_line("/proc/stat").split()[1 : 1 + _COUNTED]]
    busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE)
    anonymous = mapped = 0
    for process_id in process_ids:
        with contextlib.suppress(OSError):  # it has ended
            resident, shared = (int(text) for text in _first_line(f"/proc/{process_id}/statm").split()[1:3])
            anonymous += (resident - shared) * _PAGE_BYTES
            mapped += shared * _PAGE_BYTES
    read = device_read_bytes(path)
    return time.monotonic(), busy * _TICK_S, cached_bytes(), -1 if read is None else read, anonymous, mapped


def cached_bytes() -> int:
    """The size of the page cache."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("Cached:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no page cache")


def _first_line(path: str) -> str:
    with open(path) as file:
        return file.readline()


def watch(process_ids: Sequence[int], path: Path, connection: Connection) -> None:
    """What the process does: samples until it is told to stop, and then sends them."""
    rows = [sample(process_ids, path)]
    connection.send("ready")
    while not connection.poll(max(0.0, rows[-1][0] + INTERVAL_S - time.monotonic())):
        rows.append(sample(process_ids, path))
    rows.append(sample(process_ids, path))
    connection.send(rows)


def sampling(path: Path) -> Beside:
    """Samples beside a program that loads from `path`, and a moment before and after it."""

    @contextlib.contextmanager
    def beside(process_ids: Sequence[int]) -> Iterator[Facts]:
        here, there = context.Pipe()
        watcher = context.Process(target=watch, args=(process_ids, path, there), daemon=True)
        watcher.start()
        there.close()
        found: Facts = {}
        try:
            if not here.poll(READY_S):
                raise RuntimeError("the process that samples does not begin")
            here.recv()
            time.sleep(AROUND_S)
            yield found
            time.sleep(AROUND_S)
            here.send("stop")
            found["samples"] = dict(zip(COLUMNS, map(list, zip(*here.recv(), strict=True)), strict=True))
        finally:
            watcher.kill()
            watcher.join()
            here.close()

    return beside


# ---- what samples say --------------------------------------------------------------------------

Points = tuple[list[float], list[float]]


def since_begin(run: Facts) -> list[float]:
    """The times of the samples of a run, in seconds since its load began."""
    return [time_s - run["begin_s"] for time_s in run["samples"]["time_s"]]


def growth(run: Facts, column: str) -> Points:
    """A count over time, less what it was when the load began."""
    times, values = since_begin(run), run["samples"][column]
    before = max((index for index, at in enumerate(times) if at <= 0), default=0)
    return times, [value - values[before] for value in values]


def rate(run: Facts, column: str, window_s: float = 0.1) -> Points:
    """By how much a count grows in a second, over windows: each sample against the last that is as old."""
    times, values = since_begin(run), run["samples"][column]
    points: Points = [], []
    behind = 0
    for index, at in enumerate(times):
        while behind + 1 < index and times[behind + 1] <= at - window_s:
            behind += 1
        if at - times[behind] >= window_s:
            points[0].append(at)
            points[1].append((values[index] - values[behind]) / (at - times[behind]))
    return points


def gaps_s(run: Facts) -> list[float]:
    """The times between samples."""
    return [after - before for before, after in pairwise(run["samples"]["time_s"])]
