"""Reading jobs of the engine from start to end, and what those of a load have read so far."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from waystation import _native, storage
from waystation._errors import Corrupt, NotFound
from waystation._options import Options
from waystation.layouts.opened import ReadStatistics, Region

LEAST_STAGING_BYTES = 1 << 20

_log = logging.getLogger("waystation")

# Path, length and checksums, as `_native.start_read` takes them.
ReadFile = tuple[str, int, bytes | memoryview | None]


def start(
    files: Sequence[ReadFile],
    words: np.ndarray[Any, Any],
    owners: object,
    options: Options,
    regions: Sequence[Region] = (),
    *,
    announce: bool = False,
    among: tuple[int, int] | None = None,
    root: storage.Root | storage.Storage | None = None,
    may_be_longer: bool = False,
    versions: Sequence[str | None] | None = None,
) -> _native.Job:
    """Starts to read files as the options say.

    Args:
        files: What the records of `words` count.
        words: Records of what is read from where to where, as `_native.start_read` takes them.
        owners: What keeps the memory alive that they are read into.
        options: Of the load.
        regions: Memory of devices that some of it goes to.
        announce: Whether the job tells record by record what is in place.
        among: The number of this process among so many that read the same through the page cache, if there
            are others: each begins with another part.
        root: The directory beneath which all files are opened, or their storage; without it they are opened
            by their paths in this system.
        may_be_longer: Whether a file may have more bytes than it is said to have.
        versions: The tags that the files have, where their storage gives such; another version is Conflict.
    """
    engine = options.engine
    return _native.start_read(
        files,
        words,
        owners,
        mode=engine.read_mode,
        block_bytes=engine.block_bytes,
        depth=engine.depth,
        threads=engine.threads,
        throttle=engine.throttle_path,
        device_memory=regions or None,
        staging_bytes=_staging_bytes(options) if regions else None,
        announce=announce,
        gpu_direct=engine.gpu_direct,
        among=among,
        root=storage.engine_root(root),
        may_be_longer=may_be_longer,
        versions=versions,
    )


def _staging_bytes(options: Options) -> int | None:
    """What copies to devices may be staged in: a quarter of the memory that a load may take at a time, as is
    the engine's in any case; None for what the engine takes of its own accord."""
    limit_bytes = options.memory.read_concurrent_bytes
    return None if limit_bytes is None else max(LEAST_STAGING_BYTES, limit_bytes // 4)


def finish(job: _native.Job, statistics: ReadStatistics) -> None:
    """Waits for a job, and adds what it has read; on an error, too, it then uses no memory any more.

    Raises:
        Corrupt: A file is not there, or not what it was when the checkpoint was committed.
    """
    try:
        job.wait()
        outcome = job.result()
    except NotFound as error:
        raise Corrupt(f"a committed file is missing: {error.message}", **error.context) from error
    finally:
        if not job.done():
            job.cancel()
            job.wait()
    statistics.bytes_read += outcome["bytes_read"]
    statistics.modes.update(outcome["modes"])
    statistics.first_touch_s += outcome["first_touch_s"]
    statistics.gpu_direct_bytes += outcome["gpu_direct_bytes"]
    statistics.cached_bytes += outcome["cached_bytes"]
    statistics.repeated_requests += outcome["repeated_requests"]
    reason = outcome["gpu_direct_reason"]
    if reason is not None:
        statistics.gpu_direct_reasons.add(reason)
        _tell("not everything was read straight to the GPU, as gpu_direct asks: %s", reason)
    problem = outcome["cache_problem"]
    if problem is not None:
        _tell(
            "what was read from an object store is not kept: %s; check Context.storage.cache_directory",
            problem,
        )


@functools.cache
def _tell(message: str, reason: str) -> None:
    """Says once what a load goes on without."""
    _log.warning(message, reason)


def shared(options: Options, count: int, *, requests: int | None = None) -> Options:
    """The options of each of so many jobs that run at once, where they bound what one takes.

    Args:
        options: Of all.
        count: How many run at once.
        requests: How many requests one job has in flight of its own accord; None where that does not count.
    """
    if count < 2:
        return options
    chosen = options.thawed()
    engine, memory_options = chosen.engine, chosen.memory
    engine.depth = _share(engine.depth or requests, count)
    engine.threads = _share(engine.threads, count)
    memory_options.read_concurrent_bytes = _share(memory_options.read_concurrent_bytes, count)
    return chosen.frozen()


def _share(most: int | None, count: int) -> int | None:
    return None if most is None else max(1, most // count)


def stop(jobs: Sequence[_native.Job]) -> None:
    """Ends jobs, none of which uses memory any more then."""
    for job in jobs:
        job.cancel()
    for job in jobs:
        job.wait()
