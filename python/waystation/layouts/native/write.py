"""Writes the files of one checkpointable into a directory, durably, and of a whole checkpoint.

The data files go through the engine; their block checksums come back from the same pass. Then all
metadata is written in one batch. A small state skips the engine's own syncs: everything is synced
together at the end, which a journalling file system turns into few commits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from waystation import _native
from waystation._errors import WaystationError
from waystation._options import Options
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import merge, names
from waystation.layouts.native.attempts import Attempt
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.merge import Part
from waystation.layouts.native.records import (
    CheckpointableRecord,
    CheckpointRecord,
    Digest,
    LocalPart,
    dump_json,
)
from waystation.layouts.native.tree_file import TreeFile
from waystation.layouts.native.write_plan import WritePlan

SYNC_TOGETHER_BYTES = 8 << 20

# From this size on it pays to measure a file system that is not known yet: about a second, once.
CALIBRATE_BYTES = 1 << 30
_PROBE_BYTES = 128 << 20
_HEARTBEAT_S = 10.0

_log = logging.getLogger("waystation")


@dataclass(slots=True)
class Prepared:
    """A checkpointable that is ready to be written: nothing about it can still be refused.

    Attributes:
        name: Of the checkpointable.
        tree: Its tree file.
        sources: Its arrays, without their memory.
        chunks: What this process writes; they keep the memory alive that the plan's addresses point into.
        plan: Where every byte of them goes.
    """

    name: str
    tree: TreeFile
    sources: Sequence[ArraySource]
    chunks: Sequence[Chunk]
    plan: WritePlan


@dataclass(slots=True)
class Observer:
    """What a save reports while it runs.

    Attributes:
        on_job: Called with each engine job when it starts.
        on_copied_out: Called with a checkpointable's name once the engine is running and what goes `first`
            has been copied out.
        first: Ranges of plan positions per checkpointable that are copied out before the rest, in order.
        heartbeat: Called from time to time while the engine runs.
        alone: Whether no other process writes to the file system for the same save.
    """

    on_job: Callable[[_native.Job], None]
    on_copied_out: Callable[[str], None]
    first: dict[str, Sequence[tuple[int, int]]]
    heartbeat: Callable[[], None] = lambda: None
    alone: bool = True


def write_data(
    attempt_path: str, prepared: Prepared, options: Options, observer: Observer, unsynced: list[str]
) -> Part:
    """Writes this process's files of one checkpointable.

    Returns:
        What is to be merged. The files are durable, but for those appended to `unsynced`.
    """
    directory = os.path.join(attempt_path, prepared.name)
    together = prepared.plan.data_bytes <= SYNC_TOGETHER_BYTES
    checksums = _run(directory, prepared, options, observer, sync=not together)
    if together:
        unsynced.extend(os.path.join(directory, file.name) for file in prepared.plan.files)
    return Part.of(prepared.plan, prepared.chunks, checksums)


def write_metadata(
    attempt: Attempt,
    checkpointables: Sequence[tuple[Prepared, Sequence[Part]]],
    custom_metadata: Any,
    unsynced: list[str],
    local: LocalPart | None = None,
) -> None:
    """Writes what makes an attempt's data a whole checkpoint, and makes every byte of it durable.

    Args:
        attempt: The attempt; every process has written its data.
        checkpointables: Each with the parts of all processes, in their order.
        custom_metadata: The caller's.
        unsynced: Files that are not durable yet.
        local: Of a part of a save to local storage, which afterwards is prepared: it need not make up the
            arrays, is not to be lost with its name, and keeps its owner record until it is committed.

    Raises:
        InvalidInput: The parts do not make up the arrays.
    """
    entries: dict[str, tuple[str, Digest]] = {}
    for prepared, parts in checkpointables:
        path = os.path.join(attempt.path, prepared.name)
        contents = _metadata_files(prepared, parts, partial=local is not None)
        digests = {name: Digest.of(data) for name, data in contents.items()}
        record = CheckpointableRecord(len(parts), digests).encode()
        contents[names.CHECKPOINTABLE_RECORD] = record
        files = [(os.path.join(path, name), data) for name, data in contents.items()]
        _native.write_small_files(files, sync=False)
        unsynced = [*unsynced, *(file for file, _ in files), path]
        entries[prepared.name] = (prepared.name, Digest.of(record))
    checkpoint = CheckpointRecord(1, entries, time.time_ns(), custom_metadata, local)
    path = os.path.join(attempt.path, names.RECORD)
    _native.write_small_files([(path, checkpoint.encode())], sync=False)
    if local is None:
        attempt.seal()
    above = attempt.directories_to_sync() if local is not None else []
    _native.sync_paths([*unsynced, path, attempt.path, *above])


def _metadata_files(prepared: Prepared, parts: Sequence[Part], *, partial: bool) -> dict[str, bytes]:
    tree = prepared.tree
    merged = merge.merge(parts, prepared.sources, tree.labels, partial=partial)
    contents = {
        names.TREE: tree.encode(),
        names.FILE_TABLE: merged.encode_files(),
        names.CHUNK_TABLE: merged.encode_chunks(),
        names.CHECKSUM_TABLE: merged.encode_checksums(),
    }
    # Arrays without elements are in no part, but in a file of this process.
    index = prepared.plan.index | merge.whole_arrays(parts, tree.labels)
    if tree.labels and len(index) == len(tree.labels):
        total = int(merged.chunks["length"].sum())
        contents[names.INDEX] = dump_json({"metadata": {"total_size": total}, "weight_map": index})
    return contents


def _run(
    directory: str, prepared: Prepared, options: Options, observer: Observer, *, sync: bool
) -> list[bytes]:
    """Runs the engine over the data files; returns their block checksums."""
    files = [
        (os.path.join(directory, file.name), file.header, file.file_bytes, file.words)
        for file in prepared.plan.files
    ]
    if not files:
        observer.on_copied_out(prepared.name)
        return []
    engine = options.engine
    is_free = engine.write_mode is None and options.memory.write_limit_bytes() is None
    if observer.alone and is_free and prepared.plan.data_bytes >= CALIBRATE_BYTES:
        _calibrate_once(directory)
    first = observer.first.get(prepared.name, ())
    job = _native.start_write(
        files,
        prepared.chunks,
        sync=sync,
        mode=engine.write_mode,
        block_bytes=engine.block_bytes,
        depth=engine.depth,
        threads=engine.threads,
        staging_bytes=engine.staging_bytes,
        first=first,
        throttle=engine.throttle_path,
    )
    observer.on_job(job)
    try:
        job.wait_gathered(first[-1][1] if first else 0)
        observer.on_copied_out(prepared.name)
        while not job.wait(_HEARTBEAT_S):
            observer.heartbeat()
    except BaseException:
        job.cancel()
        job.wait()
        raise
    checksums: list[bytes] = job.result()["checksums"]
    return checksums


def _calibrate_once(directory: str) -> None:
    """Finds out how this file system is best written and read, unless that is remembered."""
    try:
        if _native.calibration(directory) is None:
            _native.calibrate(directory, probe_bytes=_PROBE_BYTES)
    except WaystationError as error:
        # What is in its way (no room, no cache directory) will stop the save itself, or does not matter.
        _log.info("the file system of '%s' could not be calibrated: %s", directory, error)
