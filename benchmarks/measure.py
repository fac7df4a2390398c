"""What is measured around an operation: memory, disk traffic, and the state of the page cache.

Everything is read from the kernel's own counters, without a thread beside the operation, so that the
measurement takes no time from it. What a machine does not permit is reported as `None`, never guessed.

What only makes figures comparable (disks at rest, an empty page cache, memory that is there) takes longer
than the operations of a `--quick` run, whose figures nobody compares, and slows down whatever else runs on
the machine: the functions for that do less if they are told that a run is `quick`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import reservoir

PAGE_BYTES = 4096
UNUSED_MEMORY = "WAYSTATION_BENCHMARK_UNUSED_MEMORY"
"""The variable that tells the processes of a session that nobody is to have used free memory lately."""
HOST_TAKES_BACK_S = 5.0
"""Linux reports free pages to its host two seconds after they became free, a part of them at a time."""
_STATUS_FIELDS = {"VmRSS": "resident", "VmHWM": "peak", "RssAnon": "anonymous", "RssFile": "mapped"}


def memory() -> dict[str, int]:
    """Resident bytes of this process: all, the most ever, anonymous, and mapped files."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS_FIELDS:
            found[_STATUS_FIELDS[name]] = int(value.split()[0]) * 1024
    return found


def available_bytes() -> int:
    """What the machine could still give to programs."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def reset_peak() -> bool:
    """Makes the kernel count the peak of resident memory anew; False where that is not permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def give_back_free_memory() -> None:
    """Returns freed memory to the system, or a later allocation could reuse it unseen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def disk_traffic() -> dict[str, int] | None:
    """Bytes that this process made the disk read and write."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    counters = dict(line.split(": ") for line in lines)
    return {"read": int(counters["read_bytes"]), "written": int(counters["write_bytes"])}


def files_under(path: Path) -> list[Path]:
    """The regular files at or under a path."""
    if path.is_file():
        return [path]
    return [Path(parent, name) for parent, _, names in os.walk(path) for name in names]


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in files_under(path))


def make_durable(path: Path) -> None:
    """Flushes the file system that a path is on, in one call.

    That is the quickest way to make a tree durable: an fsync of each file and directory would charge a
    library with hundreds of small files one flush of the disk for every one of them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "the file system could not be flushed", str(path))
    finally:
        os.close(descriptor)


def settle_disks(*, quick: bool) -> None:
    """Writes out what was removed or written before, which must not be paid for by the next run."""
    if not quick:
        os.sync()


def make_cold(path: Path, *, quick: bool = False) -> str:
    """Takes the files out of the page cache, with those of everybody else; returns how."""
    if quick:
        forget(path)
        return "advised"
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        forget(path)
        return "advised"
    return "dropped"


def forget(path: Path) -> None:
    """Takes these synced files alone out of the page cache; a kernel may not follow that advice."""
    for file in files_under(path):
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_warm(path: Path) -> None:
    """Reads the files, so that they are in the page cache.

    They are forgotten before: the kernel caches a file in pages as large as whoever read it first made it
    take, and a mapping of large ones is touched several times as fast.
    """
    scratch = bytearray(8 << 20)
    for file in files_under(path):
        with file.open("rb", buffering=0) as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while handle.readinto(scratch):
                pass


def cached_bytes(path: Path) -> int:
    """How much of the files is in the page cache. The kernel tells that of files one may write."""
    library = ctypes.CDLL(None, use_errno=True)
    cached = 0
    for file in files_under(path):
        nbytes = file.stat().st_size
        if not nbytes:
            continue
        with file.open("r+b") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        pages = np.zeros(-(-nbytes // PAGE_BYTES), np.uint8)
        address = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
        if library.mincore(address, ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)) != 0:
            raise OSError(ctypes.get_errno(), "the page cache could not be asked", str(file))
        cached += int((pages & 1).sum(dtype=np.int64)) * PAGE_BYTES
        mapped.close()
    return cached


def back_free_memory(nbytes: int, *, quick: bool = False) -> None:
    """Makes a virtual machine's host back so much of the free memory, by using it and giving it back.

    Hosts take pages back that a guest has not used for a while (free page reporting, balloons); the first
    touch of such a page costs up to ten times as much as that of one that was just freed. Without this a
    system that starts quickly after the one before it would get the good pages, and one that imports more
    would not. In a session the memory is that of its reservoir. With `--memory
    unused` the opposite is made sure of: the host has taken that memory back.
    """
    if quick or reservoir.use(nbytes):
        return
    reservoir.Held(min(nbytes, available_bytes() * 6 // 10)).close()
    if os.environ.get(UNUSED_MEMORY):
        time.sleep(HOST_TAKES_BACK_S)


def touch(views: Iterable[npt.NDArray[np.uint8]]) -> int:
    """Reads one byte of every page, so that a mapped array is really in memory."""
    return sum(int(view[::PAGE_BYTES].sum(dtype=np.int64)) for view in views)


def cpu_seconds() -> float:
    """Processor time of this process and of the programs it waited for."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


@dataclass(slots=True)
class Meter:
    """Counts over one operation: `with meter.running(): …`, with `meter.mark(name)` inside.

    `seconds[name]` is the time from the start to the mark.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    _start: float = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        give_back_free_memory()
        before, traffic, cpu = memory(), disk_traffic(), cpu_seconds()
        counted = reset_peak()
        self._start = time.perf_counter()
        yield
        after, cpu_after, traffic_after = memory(), cpu_seconds(), disk_traffic()
        self.counts["cpu_s"] = cpu_after - cpu
        self.counts["peak_growth_bytes"] = after["peak"] - before["resident"] if counted else None
        self.counts["mapped_growth_bytes"] = after["mapped"] - before["mapped"]
        if traffic is not None and traffic_after is not None:
            self.counts["disk_read_bytes"] = traffic_after["read"] - traffic["read"]
            self.counts["disk_written_bytes"] = traffic_after["written"] - traffic["written"]

    def mark(self, name: str) -> None:
        self.seconds[name] = time.perf_counter() - self._start
