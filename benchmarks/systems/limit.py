"""The limit: what the disk and the memory do when nothing but bytes is moved.

One file of as many bytes as the state has, in plain loops with O_DIRECT or through the page cache, with
several block sizes and numbers of threads or requests in flight; the way with the best median is the
limit that others are compared with. Writes include the fsync of file and directory and start from
memory that is ready; reads go into memory that nothing has touched before, as a load does. `copy` is
the plain copy of the state into untouched memory: what an asynchronous save of mutable arrays needs.

Every page begins with its own number, so that a read can be checked without a second copy. The ring
ways run a small program over io_uring (an example of the crate waystation-io that uses nothing of the
engine); it times itself and is absent where it could not be built.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import states
from benchmarks.measure import PAGE_BYTES
from benchmarks.states import Leaf
from benchmarks.systems.base import System, UnavailableError

FILE_NAME = "raw"
RING_PROGRAM = "WAYSTATION_RAW_LIMIT"
"""The environment variable that holds the path of the ring program."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Way:
    """One manner of moving the bytes: `workers` are threads, each with its own part of the file."""

    engine: str  # "threads" | "ring"
    direct: bool
    block_bytes: int
    workers: int = 1
    depth: int = 1
    preallocate: bool = False

    @property
    def name(self) -> str:
        depth = f" depth {self.depth}" if self.engine == "ring" else ""
        preallocate = " preallocated" if self.preallocate else ""
        cache = "direct" if self.direct else "buffered"
        block = f"{self.block_bytes // _MIB} MiB"
        return f"{self.engine} {cache} {block} x{self.workers}{depth}{preallocate}"


_WRITES = (
    Way("threads", True, _MIB),
    Way("threads", True, 8 * _MIB),
    Way("threads", True, _MIB, 4, preallocate=True),
    Way("threads", False, 8 * _MIB),
    Way("threads", False, _MIB, 4),
    Way("ring", True, _MIB, depth=4),
    Way("ring", True, _MIB, depth=16),
    Way("ring", True, 4 * _MIB, depth=4),
    Way("ring", True, _MIB, depth=8, preallocate=True),
)
_READS = (
    Way("threads", True, _MIB, 4),
    Way("threads", True, 8 * _MIB, 2),
    Way("threads", False, 8 * _MIB),
    Way("threads", False, _MIB, 2),
    Way("threads", False, _MIB, 4),
    Way("threads", False, 8 * _MIB, 4),
    Way("ring", True, _MIB, depth=16),
    Way("ring", True, _MIB, workers=2, depth=8),
    Way("ring", True, 4 * _MIB, depth=8),
    Way("ring", True, 2 * _MIB, depth=64),
    Way("ring", False, _MIB, workers=2, depth=8),
)
_COPIES = {"1 thread": 1, "2 threads": 2, "4 threads": 4}
_WAYS = {way.name: way for way in (*_WRITES, *_READS)}


class Limit(System):
    """The raw loops as one more system, so that their runs are interleaved with the others."""

    name = "limit"
    framework = "none"
    distribution = "waystation"
    writer = "limit"
    save_ways = tuple(way.name for way in _WRITES)
    load_ways = tuple(way.name for way in _READS)
    copy_ways = tuple(_COPIES)

    _way: Way
    _threads: int

    def prepare(self, way: str) -> None:
        self._threads = _COPIES.get(way, 1)
        self._way = _WAYS.get(way, _WRITES[0])
        if self._way.engine == "ring" and not os.environ.get(RING_PROGRAM):
            raise UnavailableError("the ring program was not built")

    def build(self, leaves: list[Leaf]) -> mmap.mmap:
        """Filled memory of the state's size, rounded up to whole pages."""
        buffer = fresh_memory(file_bytes(leaves))
        if self._way.engine == "threads":
            states.fill(Leaf("raw", (len(buffer) // 4,), "float32"), np.frombuffer(buffer, np.uint8))
            words = np.frombuffer(buffer, np.uint64)
            words[:: PAGE_BYTES // 8] = np.arange(len(buffer) // PAGE_BYTES)
        return buffer

    def template(self, leaves: list[Leaf]) -> int:
        return file_bytes(leaves)

    def save(self, path: Path, state: mmap.mmap) -> float | None:
        path.mkdir(parents=True, exist_ok=True)
        if self._way.engine == "ring":
            return _run_ring("write", path / FILE_NAME, len(state), self._way)
        _write(path / FILE_NAME, state, self._way)
        return None

    def load(self, path: Path, template: int) -> Any:
        if self._way.engine == "ring":
            return _run_ring("read", path / FILE_NAME, template, self._way)
        return _read(path / FILE_NAME, template, self._way)

    def views(self, loaded: Any) -> dict[str, npt.NDArray[np.uint8]]:
        return {} if isinstance(loaded, float) else {FILE_NAME: np.frombuffer(loaded, np.uint8)}

    def copy(self, state: mmap.mmap) -> mmap.mmap:
        """Copies the whole state into untouched memory."""
        target = fresh_memory(len(state))
        into, source = np.frombuffer(target, np.uint8), np.frombuffer(state, np.uint8)
        in_parallel(
            self._threads, len(state), lambda begin, end: np.copyto(into[begin:end], source[begin:end])
        )
        return target


def check_pages(view: npt.NDArray[np.uint8]) -> bool:
    """Whether every page begins with its number."""
    words = view.view(np.uint64)[:: PAGE_BYTES // 8]
    return bool((words == np.arange(words.size)).all())


def file_bytes(leaves: list[Leaf]) -> int:
    return -(-states.total_bytes(leaves) // PAGE_BYTES) * PAGE_BYTES


def fresh_memory(nbytes: int) -> mmap.mmap:
    """Anonymous memory without a page behind it yet; huge pages where the system grants them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def in_parallel(workers: int, nbytes: int, work: Callable[[int, int], None]) -> None:
    """Calls `work(begin, end)` for equal page-aligned parts, one thread each; raises the first error."""
    part = -(-nbytes // workers // PAGE_BYTES) * PAGE_BYTES
    errors: list[BaseException] = []

    def run(begin: int) -> None:
        try:
            work(begin, min(begin + part, nbytes))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(begin,)) for begin in range(0, nbytes, part)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _write(path: Path, source: mmap.mmap, way: Way) -> None:
    view = memoryview(source)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if way.direct else 0))
    try:
        if way.preallocate:
            os.posix_fallocate(descriptor, 0, len(source))

        def work(begin: int, end: int) -> None:
            while begin < end:
                begin += os.pwrite(descriptor, view[begin : min(begin + way.block_bytes, end)], begin)

        in_parallel(way.workers, len(source), work)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read(path: Path, nbytes: int, way: Way) -> mmap.mmap:
    target = fresh_memory(nbytes)
    view = memoryview(target)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if way.direct else 0))

    def work(begin: int, end: int) -> None:
        while begin < end:
            count = os.preadv(descriptor, [view[begin : min(begin + way.block_bytes, end)]], begin)
            if count == 0:
                raise OSError(f"'{path}' ends at byte {begin} of {nbytes}")
            begin += count

    try:
        in_parallel(way.workers, nbytes, work)
    finally:
        os.close(descriptor)
    return target


def _run_ring(direction: str, path: Path, nbytes: int, way: Way) -> float:
    """Runs the ring program, which fills or checks its memory itself; returns the seconds between."""
    command = [os.environ[RING_PROGRAM], direction, str(path), str(nbytes), str(way.block_bytes)]
    command += [str(way.workers), str(way.depth), "direct" if way.direct else "buffered"]
    command += ["preallocate"] if way.preallocate else []
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise OSError(f"the ring program failed: {finished.stderr.strip()}")
    return float(json.loads(finished.stdout)["seconds"])
