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

import numpy as np

from waystation import _native
from waystation._errors import WaystationError
from waystation._options import Options
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import names, tables, write_plan
from waystation.layouts.native.attempts import Attempt
from waystation.layouts.native.records import CheckpointableRecord, CheckpointRecord, Digest, dump_json
from waystation.layouts.native.tree_file import TreeFile

SYNC_TOGETHER_BYTES = 8 << 20

# From this size on it pays to measure a file system that is not known yet: about a second, once.
CALIBRATE_BYTES = 1 << 30
_PROBE_BYTES = 64 << 20
_HEARTBEAT_S = 10.0

_log = logging.getLogger("waystation")


@dataclass(slots=True)
class Prepared:
    """A checkpointable that is ready to be written: nothing about it can still be refused.

    Attributes:
        name: Of the checkpointable.
        tree: Its tree file, with the labels of the plan.
        sources: Its arrays; they keep the memory alive that the plan's addresses point into.
        plan: Where every byte goes.
    """

    name: str
    tree: TreeFile
    sources: Sequence[ArraySource]
    plan: write_plan.WritePlan


@dataclass(slots=True)
class Observer:
    """What a save reports while it runs.

    Attributes:
        on_job: Called with each engine job when it starts.
        on_copied_out: Called with a checkpointable's name once the engine is running and the source
            bytes before `drain_position` have been copied out.
        drain_positions: Plan position per checkpointable, see `on_copied_out`.
    """

    on_job: Callable[[_native.Job], None]
    on_copied_out: Callable[[str], None]
    drain_positions: dict[str, int]


def write_checkpoint(
    attempt: Attempt,
    checkpointables: Sequence[Prepared],
    custom_metadata: Any,
    options: Options,
    observer: Observer,
) -> None:
    """Fills an attempt's directory with a whole checkpoint and makes every byte of it durable."""
    unsynced: list[str] = []
    entries: dict[str, tuple[str, Digest]] = {}
    for prepared in checkpointables:
        directory = prepared.name
        path = os.path.join(attempt.path, directory)
        os.mkdir(path)
        record = _write_checkpointable(path, prepared, attempt, options, observer, unsynced)
        entries[prepared.name] = (directory, Digest.of(record))
    checkpoint = CheckpointRecord(1, entries, time.time_ns(), custom_metadata)
    path = os.path.join(attempt.path, names.RECORD)
    _native.write_small_files([(path, checkpoint.encode())], sync=False)
    attempt.seal()
    _native.sync_paths([*unsynced, path, attempt.path])


def _write_checkpointable(
    directory: str,
    prepared: Prepared,
    attempt: Attempt,
    options: Options,
    observer: Observer,
    unsynced: list[str],
) -> bytes:
    plan = prepared.plan
    together = plan.data_bytes <= SYNC_TOGETHER_BYTES
    checksums = _write_data(directory, prepared, attempt, options, observer, sync=not together)
    plan.tables.checksums = np.frombuffer(b"".join(checksums), "<u8")
    contents = _metadata_files(prepared)
    record = CheckpointableRecord(1, {name: Digest.of(data) for name, data in contents.items()}).encode()
    contents[names.CHECKPOINTABLE_RECORD] = record
    files = [(os.path.join(directory, name), data) for name, data in contents.items()]
    _native.write_small_files(files, sync=False)
    if together:
        unsynced.extend(os.path.join(directory, file.name) for file in plan.files)
    unsynced.extend(path for path, _ in files)
    unsynced.append(directory)
    return record


def _metadata_files(prepared: Prepared) -> dict[str, bytes]:
    encoded: tables.Tables = prepared.plan.tables
    contents = {
        names.TREE: prepared.tree.encode(),
        names.FILE_TABLE: encoded.encode_files(),
        names.CHUNK_TABLE: encoded.encode_chunks(),
        names.CHECKSUM_TABLE: encoded.encode_checksums(),
    }
    if prepared.plan.index:
        index = {"metadata": {"total_size": prepared.plan.data_bytes}, "weight_map": prepared.plan.index}
        contents[names.INDEX] = dump_json(index)
    return contents


def _write_data(
    directory: str,
    prepared: Prepared,
    attempt: Attempt,
    options: Options,
    observer: Observer,
    *,
    sync: bool,
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
    if engine.write_mode is None and prepared.plan.data_bytes >= CALIBRATE_BYTES:
        _calibrate_once(attempt.path)
    job = _native.start_write(
        files,
        prepared.sources,
        sync=sync,
        mode=engine.write_mode,
        block_bytes=engine.block_bytes,
        depth=engine.depth,
        threads=engine.threads,
    )
    observer.on_job(job)
    try:
        job.wait_gathered(observer.drain_positions.get(prepared.name, 0))
        observer.on_copied_out(prepared.name)
        while not job.wait(_HEARTBEAT_S):
            attempt.heartbeat()
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
