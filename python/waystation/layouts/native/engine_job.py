"""One job of the engine from start to end: data files written, durable if asked for, watched meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from waystation import _native, storage
from waystation._errors import WaystationError
from waystation._options import Options

# From this size on it pays to measure a file system that is not known yet: about a second, once.
CALIBRATE_BYTES = 1 << 30
_PROBE_BYTES = 128 << 20
HEARTBEAT_S = 10.0

_log = logging.getLogger("waystation")

FileRecord = tuple[str, bytes, int, Any]  # as `_native.start_write` takes them
CopyRecord = tuple[str, bytes, Any, int, Any, int | None]  # as `_native.start_copy` does
SourceRecord = tuple[str, int, Any, str | None]


def run(
    files: Sequence[FileRecord],
    owners: object,
    options: Options,
    first: Sequence[tuple[int, int]],
    on_job: Callable[[_native.Job], None],
    on_copied_out: Callable[[], None],
    heartbeat: Callable[[], None],
    *,
    sync: bool = True,
    group: _native.SyncGroup | None = None,
) -> list[bytes]:
    """Writes files; returns their block checksums.

    Args:
        files: What is written where.
        owners: What keeps the sources alive.
        options: Of the save.
        first: Ranges of plan positions that are copied out before the rest, in order.
        on_job: Called with the job when it starts.
        on_copied_out: Called once those ranges have been copied out.
        heartbeat: Called from time to time while the job runs.
        sync: Whether the files are durable in the end.
        group: Holds the files instead until it is synced.
    """
    job = start(files, owners, options, first, sync=sync, group=group)
    on_job(job)
    try:
        job.wait_gathered(first[-1][1] if first else 0)
        on_copied_out()
        return finish(job, heartbeat)
    except BaseException:
        stop(job)
        raise


def start(
    files: Sequence[FileRecord],
    owners: object,
    options: Options,
    first: Sequence[tuple[int, int]] = (),
    *,
    sync: bool = True,
    group: _native.SyncGroup | None = None,
) -> _native.Job:
    """Starts to write files as the options say."""
    engine = options.engine
    return _native.start_write(
        files,
        owners,
        sync=sync,
        group=group,
        mode=engine.write_mode,
        block_bytes=engine.block_bytes,
        depth=engine.depth,
        threads=engine.threads,
        staging_bytes=engine.staging_bytes,
        first=first,
        throttle=engine.throttle_path,
        root=storage.engine_of(files[0][0]) if files else None,
    )


def start_copy(
    files: Sequence[CopyRecord],
    sources: Sequence[SourceRecord],
    options: Options,
    *,
    source: Any,
    readers: int,
    root: _native.ObjectStore | None = None,
    group: _native.SyncGroup | None = None,
    staging_bytes: int | None = None,
    throttle: str | None = None,
) -> _native.Job:
    """Starts to make files of others, as the options say.

    The bound of memory counts where the options have none, a throttle in the place of theirs.
    """
    engine = options.engine
    return _native.start_copy(
        files,
        sources,
        source=source,
        root=root,
        group=group,
        mode=engine.write_mode,
        read_mode=engine.read_mode,
        block_bytes=engine.block_bytes,
        depth=engine.depth,
        threads=engine.threads,
        readers=readers,
        staging_bytes=engine.staging_bytes or staging_bytes,
        throttle=throttle or engine.throttle_path,
    )


def finish(job: _native.Job, heartbeat: Callable[[], None]) -> list[bytes]:
    """Waits for a job; returns the block checksums of its files."""
    while not job.wait(HEARTBEAT_S):
        heartbeat()
    checksums: list[bytes] = job.result()["checksums"]
    return checksums


def stop(job: _native.Job) -> None:
    """Ends a job; afterwards nothing reads the memory of its sources, and its files are gone."""
    job.cancel()
    job.wait()


def calibrate_once(directory: str, options: Options, data_bytes: int) -> None:
    """Finds out how the file system is best written and read, unless that is remembered or would not pay."""
    is_free = options.engine.write_mode is None and options.memory.write_limit_bytes() is None
    if not is_free or data_bytes < CALIBRATE_BYTES:
        return
    try:
        if _native.calibration(directory) is None:
            _native.calibrate(directory, probe_bytes=_PROBE_BYTES)
    except WaystationError as error:
        # What is in its way (no room, no cache directory) will stop the save itself, or does not matter.
        _log.info("the file system of '%s' could not be calibrated: %s", directory, error)
