"""What a process keeps of a version: its *shard*, laid out for a slot.

A shard holds entries: a box of an array by `<checkpointable>/arrays/<label>`, the structure of a state by
`<checkpointable>/tree.json`, a file that a handler made by `<checkpointable>/files/<path>`, and what is said
of the whole by `shard.json`. Invariants: array bytes are planned exactly as a save to disk plans them, so the
shards of all processes cover every array once; nothing is copied here but what is in the memory of devices;
what all processes have alike (structures, scalars) is in the shard of the primary alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._collection import paused_collection
from waystation._errors import Corrupt, Unsupported
from waystation.checkpoint.prepare import Taken
from waystation.frameworks.base import Block
from waystation.layouts.native import tree_file, write_plan
from waystation.layouts.native.blocks import copied_to_host
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.records import dump_json, load_json
from waystation.layouts.opened import StoredTree

ARRAYS, FILES = "arrays", "files"
TREE = "tree.json"
RECORD = "shard.json"
RECORD_VERSION = 1

_BYTES = "U8"  # the dtype of what is no array

# Path, dtype, shape of the array, offset and shape of the box, bytes: as `_native.place_shard` takes it.
_Entry: TypeAlias = tuple[str, str, Sequence[int], Sequence[int], Sequence[int], int]


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What every shard says of its version.

    Attributes:
        process_count: How many shards the version has.
        handlers: All checkpointables by name, with the type that saved each; None for a state.
        custom_metadata: What was given to the save.
        begun_ns: When the save began, nanoseconds since 1970, as the primary says: what the same call has
            saved to the disk has the same there.
    """

    process_count: int
    handlers: Mapping[str, str | None]
    custom_metadata: Any
    begun_ns: int

    def encode(self) -> bytes:
        """The bytes of the entry."""
        return dump_json(
            {
                "version": RECORD_VERSION,
                "process_count": self.process_count,
                "checkpointables": dict(self.handlers),
                "custom_metadata": self.custom_metadata,
                "begun_ns": self.begun_ns,
            }
        )

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """Reads what `encode` made; `where` names it in errors.

        Raises:
            Unsupported: A later version of Waystation made it.
            Corrupt: It is nothing of the kind.
        """
        body = load_json(data, where)
        try:
            if body["version"] > RECORD_VERSION:
                raise Unsupported(f"'{where}' is of version {body['version']}: upgrade Waystation")
            return cls(
                body["process_count"], body["checkpointables"], body["custom_metadata"], body["begun_ns"]
            )
        except (KeyError, TypeError) as error:
            if isinstance(error, Unsupported):
                raise
            raise Corrupt(f"'{where}' is malformed: {error}") from error


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard, ready to be copied to a slot.

    Attributes:
        contents: The table of contents.
        segments: Segment records as `AgentClient.start_save` takes them.
        chunks: What they are about; keeps its memory alive.
        data_bytes: How long the data are.
        can_change: Whether the program could change that memory, so that it must wait for the copy.
    """

    contents: bytes
    segments: NDArray[np.int64]
    chunks: Sequence[tuple[Chunk, int]]
    data_bytes: int
    can_change: bool


@paused_collection()
def lay_out(
    record: ShardRecord, states: Mapping[str, Taken], files: Mapping[str, bytes], *, is_primary: bool
) -> Shard:
    """Lays out the shard of this process.

    Args:
        record: What it says of its version.
        states: The states by name, as this process has taken them.
        files: What handlers have made in this process, by the paths of the entries.
        is_primary: Whether this process keeps what all have alike.

    Raises:
        InvalidInput: A key path is too long for a table of contents.
    """
    made = _Entries()
    made.add_bytes(RECORD, record.encode())
    for name, taken in states.items():
        if is_primary:
            tree = StoredTree(taken.structure, taken.leaves, taken.sources, taken.labels)
            made.add_bytes(f"{name}/{TREE}", tree_file.encode(tree))
        made.add_arrays(name, taken)
    for path, content in files.items():
        made.add_bytes(path, content)
    return made.placed()


def path_of_file(name: str, file: str) -> str:
    """The path of the entry of a file that the handler of a checkpointable made."""
    return f"{name}/{FILES}/{file}"


@dataclass(slots=True)
class _Entries:
    """The entries of a shard as they come together, each with the memory that it is gathered from."""

    entries: list[_Entry] = field(default_factory=list)
    chunks: list[tuple[Chunk, int]] = field(default_factory=list)  # with the bytes of an element
    can_change: bool = False

    def add_bytes(self, path: str, content: bytes) -> None:
        held = np.frombuffer(content, np.uint8)
        shape = (len(content),)
        self.entries.append((path, _BYTES, shape, (0,), shape, len(content)))
        block = Block((0,), shape, (1,), held.ctypes.data, held)
        self.chunks.append((Chunk(-1, None, shape, len(content), [block]), 1))

    def add_arrays(self, name: str, taken: Taken) -> None:
        for chunk in taken.chunks:
            if not chunk.nbytes:
                continue  # the tree says that the array has no elements
            source = taken.sources[chunk.array]
            whole = source.storage_shape
            offset = (0,) * len(whole) if chunk.offset is None else chunk.offset
            path = f"{name}/{ARRAYS}/{taken.labels[chunk.array]}"
            self.entries.append((path, source.storage_dtype, whole, offset, chunk.shape, chunk.nbytes))
            on_host = _on_host(chunk, source.storage_item_bytes)
            self.can_change |= source.mutable and on_host is chunk
            self.chunks.append((on_host, source.storage_item_bytes))

    def placed(self) -> Shard:
        contents, offsets, data_bytes = _native.place_shard(self.entries)
        segments: list[int] = []
        for offset, (chunk, item_bytes) in zip(offsets, self.chunks, strict=True):
            if chunk.nbytes:
                segments += write_plan.segment_words(offset, chunk, item_bytes)
        return Shard(contents, np.asarray(segments, np.int64), self.chunks, data_bytes, self.can_change)


def _on_host(chunk: Chunk, item_bytes: int) -> Chunk:
    """The chunk, with what is in memory of devices copied to the host."""
    if all(block.device < 0 for block in chunk.blocks):
        return chunk
    blocks = [block if block.device < 0 else copied_to_host(block, item_bytes) for block in chunk.blocks]
    return Chunk(chunk.array, chunk.offset, chunk.shape, chunk.nbytes, blocks)
