"""Writes the files of the checkpointables of a save into its attempt, durably, and of a whole checkpoint.

The data files of all states go through the engine in one job; their block checksums come back from the same
pass. Then all metadata is written in one batch. Small states skip the engine's own syncs: everything is
synced together at the end, which a journalling file system turns into few commits. What handlers made is
there already, and only vouched for here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waystation import _native, storage
from waystation._options import Options
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import engine_job, handler_files, merge, names, tree_file
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.in_store import StoreAttempt
from waystation.layouts.native.merge import Part
from waystation.layouts.native.records import (
    HANDLED,
    CheckpointableRecord,
    CheckpointRecord,
    Digest,
    dump_json,
)
from waystation.layouts.native.write_plan import WritePlan
from waystation.layouts.opened import StoredTree
from waystation.storage.attempts import Attempt

SYNC_TOGETHER_BYTES = 8 << 20


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
    tree: StoredTree
    sources: Sequence[ArraySource]
    chunks: Sequence[Chunk]
    plan: WritePlan


@dataclass(frozen=True, slots=True)
class Handled:
    """A checkpointable that a handler writes.

    Attributes:
        name: Of the checkpointable.
        handler: Name of the handler's type.
        process_count: How many processes have called it.
    """

    name: str
    handler: str
    process_count: int

    def directory(self, attempt_path: str) -> str:
        """Where the handler puts its files."""
        return os.path.join(attempt_path, self.name)


@dataclass(slots=True)
class Observer:
    """What a save reports while it runs.

    Attributes:
        on_job: Called with each engine job when it starts.
        on_copied_out: Called once the engine is running and what goes `first` has been copied out.
        first: Ranges of plan positions per checkpointable that are copied out before the rest, in order.
        heartbeat: Called from time to time while the engine runs.
        alone: Whether no other process writes to the file system for the same save.
    """

    on_job: Callable[[_native.Job], None]
    on_copied_out: Callable[[], None]
    first: dict[str, Sequence[tuple[int, int]]]
    heartbeat: Callable[[], None] = lambda: None
    alone: bool = True


def write_data(
    attempt_path: str,
    prepared: Sequence[Prepared],
    options: Options,
    observer: Observer,
    group: _native.SyncGroup | None = None,
) -> list[Part]:
    """Writes this process's files of states.

    Returns:
        What is to be merged, of each. The files are durable, but for those that `group` holds.
    """
    directories = {entry.name: names.directory_in(attempt_path, entry.name) for entry in prepared}
    files = [
        (os.path.join(directories[entry.name], file.name), file.header, file.file_bytes, file.words)
        for entry in prepared
        for file in entry.plan.files
    ]
    together = sum(entry.plan.data_bytes for entry in prepared) <= SYNC_TOGETHER_BYTES
    checksums = iter(_run(attempt_path, files, prepared, options, observer, group if together else None))
    return [
        Part.of(entry.plan, entry.chunks, entry.plan.checksums([next(checksums) for _ in entry.plan.files]))
        for entry in prepared
    ]


def write_metadata(
    attempt: Attempt,
    states: Sequence[tuple[Prepared, Sequence[Part]]],
    group: _native.SyncGroup,
    checkpoint: CheckpointRecord,
    handled: Sequence[Handled] = (),
) -> None:
    """Writes what makes an attempt's data a whole checkpoint, and makes every byte of it durable.

    Args:
        attempt: The attempt; every process has written its data.
        states: Each with the parts of all processes, in their order.
        group: What is not durable yet.
        checkpoint: The record, without its checkpointables. Of a part of a save to local storage, which
            afterwards is prepared, it says so: such need not make up the arrays, is not to be lost with its
            name, and keeps its owner record until it is committed.
        handled: What handlers have written.

    Raises:
        InvalidInput: The parts do not make up the arrays.
        InvalidInput: A handler has made a file whose name is reserved.
        Unsupported: A handler has made what cannot be vouched for.
    """
    is_part = checkpoint.local is not None
    files: list[tuple[str, bytes]] = []
    entries: dict[str, tuple[str, Digest]] = {}
    for prepared, parts in states:
        contents = metadata_files(prepared, parts, partial=is_part)
        directory = os.path.join(attempt.path, prepared.name)
        files += [(os.path.join(directory, name), data) for name, data in contents.items()]
        entries[prepared.name] = (prepared.name, Digest.of(contents[names.CHECKPOINTABLE_RECORD]))
    for entry in handled:
        made = handler_files.made(entry.directory(attempt.path), entry.name)
        record = CheckpointableRecord(entry.process_count, {}, HANDLED, entry.handler, made).encode()
        files.append((os.path.join(attempt.path, entry.name, names.HANDLED_RECORD), record))
        entries[entry.name] = (entry.name, Digest.of(record))
    checkpoint = dataclasses.replace(checkpoint, checkpointables=entries)
    files.append((os.path.join(attempt.path, names.RECORD), checkpoint.encode()))
    _native.write_small_files(files, group=group)
    if not is_part:
        attempt.seal()
    directories = [os.path.join(attempt.path, name) for name in entries]
    above = attempt.directories_to_sync() if is_part else []
    group.add([*directories, attempt.path, *above])
    group.sync()


def write_metadata_to_store(
    attempt: StoreAttempt,
    states: Sequence[tuple[Prepared, Sequence[Part]]],
    checkpoint: CheckpointRecord,
    handled: Mapping[str, CheckpointableRecord],
) -> CheckpointRecord:
    """Writes what makes an attempt's data a whole checkpoint, but for the record, which this returns.

    Args:
        attempt: The attempt; every process has written its data.
        states: Each with the parts of all processes, in their order.
        checkpoint: The record, without its checkpointables.
        handled: The records of what handlers have written.

    Raises:
        InvalidInput: The parts do not make up the arrays.
    """
    contents = {prepared.name: metadata_files(prepared, parts, partial=False) for prepared, parts in states}
    contents |= {name: {names.CHECKPOINTABLE_RECORD: record.encode()} for name, record in handled.items()}
    files: list[tuple[str, bytes]] = []
    entries: dict[str, tuple[str, Digest]] = {}
    for name, own in contents.items():
        directory = names.directory_in(attempt.path, name)
        files += [(os.path.join(directory, file), data) for file, data in own.items()]
        entries[name] = (os.path.basename(directory), Digest.of(own[names.CHECKPOINTABLE_RECORD]))
    attempt.write_last(files)
    return dataclasses.replace(checkpoint, checkpointables=entries)


def metadata_files(prepared: Prepared, parts: Sequence[Part], *, partial: bool) -> dict[str, bytes]:
    """The metadata files of a state, its record the last of them.

    Args:
        prepared: The state.
        parts: What all processes have written of it, in their order.
        partial: Whether the parts need not make up the arrays.
    """
    tree = prepared.tree
    merged = merge.merge(parts, prepared.sources, tree.labels, partial=partial)
    contents = {
        names.TREE: tree_file.encode(tree),
        names.FILE_TABLE: merged.encode_files(),
        names.CHUNK_TABLE: merged.encode_chunks(),
        names.CHECKSUM_TABLE: merged.encode_checksums(),
    }
    # Arrays without elements are in no part, but in a file of this process.
    index = prepared.plan.index
    if len(index) < len(tree.labels):
        index = index | merge.whole_arrays(parts, tree.labels)
    total = int(merged.chunks["length"].sum())
    # Other tools load all tensors of the files that an index names, and so would load dead ones. They find
    # files in the directory of the index only.
    places = merge.places(parts)
    has_dead = total != int((merged.files["file_bytes"] - merged.files["data_start"]).sum())
    if tree.labels and len(index) == len(tree.labels) and not has_dead and not places:
        contents[names.INDEX] = dump_json({"metadata": {"total_size": total}, "weight_map": index})
    tables = {name: Digest.of(data) for name, data in contents.items()}
    contents[names.CHECKPOINTABLE_RECORD] = CheckpointableRecord(len(parts), tables, places=places).encode()
    return contents


def _run(
    attempt_path: str,
    files: Sequence[tuple[str, bytes, int, Any]],
    prepared: Sequence[Prepared],
    options: Options,
    observer: Observer,
    group: _native.SyncGroup | None,
) -> list[bytes]:
    """Runs the engine over the data files; returns their block checksums."""
    if not files:
        observer.on_copied_out()
        return []
    data_bytes = sum(entry.plan.data_bytes for entry in prepared)
    if observer.alone and storage.engine_of(attempt_path) is None:
        engine_job.calibrate_once(attempt_path, options, data_bytes)
    return engine_job.run(
        files,
        [entry.chunks for entry in prepared],
        options,
        _in_job(prepared, observer.first),
        observer.on_job,
        observer.on_copied_out,
        observer.heartbeat,
        group=group,
    )


def _in_job(
    prepared: Sequence[Prepared], first: dict[str, Sequence[tuple[int, int]]]
) -> list[tuple[int, int]]:
    """The ranges that go first, counted over the plans of all states."""
    ranges: list[tuple[int, int]] = []
    position = 0
    for entry in prepared:
        ranges += [(begin + position, end + position) for begin, end in first.get(entry.name, ())]
        position += entry.plan.data_bytes
    return ranges
