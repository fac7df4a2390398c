"""Saves tensors as a set of files of about the same size, in the way of fastsafetensors.

Invariants: all files are whole before the first of them gets its name, and what fails leaves none of them
behind. Tensors of torch go to the engine by their addresses, with no copy on the way; what a caller's
function makes is written into mapped files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from waystation import _native, storage
from waystation._errors import DiskFull, InvalidInput
from waystation._options.in_effect import current_options
from waystation._threads import Threads
from waystation.compat.fastsafetensors.shard_files import Staged, by_addresses, by_mapping
from waystation.compat.fastsafetensors.shard_plans import (
    KEY_SHARD_COUNT,
    KEY_SHARD_INDEX,
    KEY_SHARD_SET,
    ShardMetadataFn,
    ShardPlan,
    ShardSetError,
    WriteEntry,
    plain_entry,
    plan_shards,
    shard_paths,
    validate_shard_set,
)
from waystation.compat.fastsafetensors.tensors import check_framework, wrapped
from waystation.transfers.statistics import SaveStatistics, failures_published, tell

__all__ = [
    "KEY_SHARD_COUNT",
    "KEY_SHARD_INDEX",
    "KEY_SHARD_SET",
    "FillFn",
    "ParallelSaver",
    "ShardMetadataFn",
    "ShardPlan",
    "ShardSetError",
    "WriteEntry",
    "per_entry_fill",
    "plain_entry",
    "plan_shards",
    "save_sharded",
    "shard_paths",
    "tensor_fill",
    "validate_shard_set",
    "write_shards",
]

# Fills memory that belongs to entries, and keeps none of it.
FillFn: TypeAlias = Callable[[list[tuple[memoryview, WriteEntry]]], None]


def per_entry_fill(fn: Callable[[memoryview, WriteEntry], None], num_threads: int = 8) -> FillFn:
    """What fills entries by a function of each, in so many threads.

    Raises:
        ValueError: There are none.
    """
    if num_threads < 1:
        raise InvalidInput(f"num_threads is {num_threads}; give at least 1")

    def fill(work: list[tuple[memoryview, WriteEntry]]) -> None:
        with Threads(num_threads, "fill") as threads:
            for done in [threads.submit(fn, buffer, entry) for buffer, entry in work]:
                done.result()

    return fill


def tensor_fill(num_threads: int = 8, *, framework: str = "pytorch") -> FillFn:
    """What fills entries by the tensors that are their sources."""
    check_framework(framework)
    return _TensorFill(per_entry_fill(_copy, num_threads))


def _copy(buffer: memoryview, entry: WriteEntry) -> None:
    wrapped(entry.source).copy_to_buffer(buffer)


class _TensorFill:
    """Marks that entries have tensors as sources, which need no buffers."""

    def __init__(self, fill: FillFn) -> None:
        self._fill = fill

    def __call__(self, work: list[tuple[memoryview, WriteEntry]]) -> None:
        self._fill(work)


def write_shards(
    plans: Sequence[ShardPlan], fill: FillFn, *, min_free_bytes: int = 0, fsync: bool = False
) -> list[str]:
    """Writes files and gives them their names, once all are whole.

    Args:
        plans: The files.
        fill: Fills the memory of all entries, the largest first.
        min_free_bytes: What has to be free on the file system beyond the files.
        fsync: Whether the files are durable in the end.

    Returns:
        Their paths.

    Raises:
        OSError: There is no room, or a file cannot be written.
    """
    begun_s = time.monotonic()
    path = _called(plans)
    with failures_published("save", path, begun_s):
        _write(plans, fill, min_free_bytes, fsync=fsync)
    duration_s = time.monotonic() - begun_s
    nbytes = sum(plan.total_bytes for plan in plans)
    # Written, synced and moved in one go.
    statistics = SaveStatistics(path, nbytes, duration_s, duration_s, duration_s, duration_s)
    tell([statistics], current_options().array.saving.on_statistics, "array.saving.on_statistics")
    return [plan.path for plan in plans]


def _called(plans: Sequence[ShardPlan]) -> str:
    """What a save is called: the file, or the directory of several."""
    paths = [os.path.abspath(plan.path) for plan in plans]
    return paths[0] if len(paths) == 1 else os.path.dirname(paths[0]) if paths else "(no files)"


def _write(plans: Sequence[ShardPlan], fill: FillFn, min_free_bytes: int, *, fsync: bool) -> None:
    _check_room(plans, min_free_bytes)
    staged = [Staged(plan.path, plan.header, plan.total_bytes) for plan in plans]
    try:
        if isinstance(fill, _TensorFill):
            by_addresses(staged, [[entry.source for entry in plan.entries] for plan in plans], fsync=fsync)
        else:
            spans = [[plan.offsets[entry.name] for entry in plan.entries] for plan in plans]
            with by_mapping(staged, spans, fsync=fsync) as buffers:
                entries = [entry for plan in plans for entry in plan.entries]
                work = sorted(zip(buffers, entries, strict=True), key=lambda pair: -pair[1].nbytes)
                fill(work)
        for file in staged:
            file.publish()
    finally:
        for file in staged:
            file.discard()
    if fsync:
        _native.sync_paths(sorted({os.path.dirname(file.path) for file in staged}))


def _check_room(plans: Sequence[ShardPlan], min_free_bytes: int) -> None:
    needed = sum(plan.total_bytes for plan in plans) + min_free_bytes
    for directory in sorted({os.path.dirname(os.path.abspath(plan.path)) for plan in plans}):
        storage.make_directory(directory, parents=True)
        free = storage.of(directory).free_bytes(directory)
        if free is not None and free < needed:
            raise DiskFull(f"{needed} bytes are needed, and {free} are free", path=directory)


def save_sharded(
    entries: Sequence[WriteEntry],
    base: str,
    *,
    num_shards: int = 16,
    fill: FillFn | None = None,
    framework: str = "pytorch",
    min_free_bytes: int = 0,
    fsync: bool = False,
    metadata: Mapping[str, str] | None = None,
    shard0_metadata: Mapping[str, str] | None = None,
    shard_metadata: ShardMetadataFn | None = None,
    header_align: int = 8,
) -> list[str]:
    """Writes entries as `{base}-00001-of-0000N.safetensors`, …; see `plan_shards` and `write_shards`."""
    plans = plan_shards(
        entries,
        shard_paths(base, num_shards),
        metadata=metadata,
        shard0_metadata=shard0_metadata,
        shard_metadata=shard_metadata,
        header_align=header_align,
    )
    filling = tensor_fill(framework=framework) if fill is None else fill
    return write_shards(plans, filling, min_free_bytes=min_free_bytes, fsync=fsync)


class ParallelSaver:
    """Saves tensors as sets of files.

    Args:
        num_shards: The number of files.
        framework: `"pytorch"`, or `"pt"`.
        num_threads: In which tensors are copied where they are; the engine needs none.
        shard_metadata: Says more of each file, from its entries.
        fill: Fills the memory of entries; by default their tensors are written.
        min_free_bytes: What has to be free on the file system beyond the files.
        fsync: Whether the files are durable in the end.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(
        self,
        *,
        num_shards: int = 16,
        framework: str = "pytorch",
        num_threads: int = 8,
        shard_metadata: ShardMetadataFn | None = None,
        fill: FillFn | None = None,
        min_free_bytes: int = 0,
        fsync: bool = False,
    ) -> None:
        if min(num_shards, num_threads) < 1:
            raise InvalidInput(f"num_shards is {num_shards} and num_threads {num_threads}; give at least 1")
        self.num_shards = num_shards
        self.framework = framework
        self.num_threads = num_threads
        self.shard_metadata = shard_metadata
        self.fill = fill
        self.min_free_bytes = min_free_bytes
        self.fsync = fsync

    def save(
        self,
        tensors: Mapping[str, Any],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves tensors, by name, as `{base}-00001-of-0000N.safetensors`, …; returns the paths."""
        return self.save_entries(
            [plain_entry(name, tensor, framework=self.framework) for name, tensor in tensors.items()],
            base,
            metadata=metadata,
            shard0_metadata=shard0_metadata,
            header_align=header_align,
        )

    def save_entries(
        self,
        entries: Sequence[WriteEntry],
        base: str,
        *,
        metadata: Mapping[str, str] | None = None,
        shard0_metadata: Mapping[str, str] | None = None,
        header_align: int = 8,
    ) -> list[str]:
        """Saves entries, like `save`."""
        fill = self.fill
        if fill is None:
            fill = tensor_fill(self.num_threads, framework=self.framework)
        return save_sharded(
            entries,
            base,
            num_shards=self.num_shards,
            fill=fill,
            min_free_bytes=self.min_free_bytes,
            fsync=self.fsync,
            metadata=metadata,
            shard0_metadata=shard0_metadata,
            shard_metadata=self.shard_metadata,
            header_align=header_align,
        )
