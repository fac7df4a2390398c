"""Where the chunks of a version are: the tables of a checkpoint, made of what its shards contain.

Loads then plan from them as from the tables of a file. Invariants: every array is covered exactly once (where
other hosts keep shards that cannot be reached: at most once), or an error says where not; what a shard says
of an array agrees with the structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from waystation import grid
from waystation._collection import paused_collection
from waystation._errors import Corrupt
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.layouts.native import tables
from waystation.layouts.opened import StoredTree

# Path, length and checksums, as `HeldShard.file` is.
File: TypeAlias = tuple[str, int, bytes]
# Path, dtype, shape of the array, offset and shape of the box, offset in the file, bytes: one of
# `HeldShard.entries`.
Entry: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A chunk in a slot."""

    file: int
    box: grid.Box
    offset: int
    nbytes: int


@paused_collection()
def make(
    tree: StoredTree,
    prefix: str,
    files: Sequence[File],
    entries: Sequence[Sequence[Entry]],
    *,
    are_all: bool,
) -> tables.Tables:
    """The tables of one state.

    Args:
        tree: Its structure.
        prefix: What the paths of its arrays begin with.
        files: The slots that can be reached.
        entries: What is in each.
        are_all: Whether the version has no other shards.

    Raises:
        Corrupt: The shards leave a hole in an array, overlap, or contradict the structure.
    """
    numbers = {f"{prefix}{label}": number for number, label in enumerate(tree.labels)}
    stored: list[list[_Stored]] = [[] for _ in tree.labels]
    for file, listed in enumerate(entries):
        for path, dtype, shape, offset, extent, at, nbytes in listed:
            if not path.startswith(prefix):
                continue
            number = numbers.get(path, -1)
            if number < 0 or not _is_of(tree.arrays[number], dtype, shape):
                raise Corrupt(
                    f"'{path}' in a slot of the memory tier is no array of the state that the slot is of",
                    path=files[file][0],
                )
            stored[number].append(_Stored(file, (offset, extent), at, nbytes))
    return _Arrangement(tree, are_all=are_all).of(stored, files)


def _is_of(array: StoredArray, dtype: str, shape: tuple[int, ...]) -> bool:
    return (array.storage_dtype, array.storage_shape) == (dtype, shape)


class _Arrangement:
    """The sections of the tables as they grow, array by array."""

    def __init__(self, tree: StoredTree, *, are_all: bool) -> None:
        self._tree = tree
        self._are_all = are_all
        self._chunks: list[_Stored] = []
        self._dims: list[int] = []

    def of(self, stored: Sequence[Sequence[_Stored]], files: Sequence[File]) -> tables.Tables:
        """The tables of all arrays."""
        entries = np.zeros(len(stored), tables.ARRAY_ENTRY)
        for number, chunks in enumerate(stored):
            first_chunk, first_dim = len(self._chunks), len(self._dims)
            kind = self._add(number, chunks)
            array = self._tree.arrays[number]
            entries[number] = (
                kind,
                len(array.storage_shape),
                8 * dtypes.of_stored(array).storage_item_bytes,
                0,
                first_chunk,
                len(self._chunks) - first_chunk,
                first_dim,
                len(self._dims) - first_dim,
            )
        return tables.Tables(
            _file_entries(files),
            entries,
            _chunk_entries(self._chunks),
            np.array(self._dims, np.uint64),
            np.frombuffer(b"".join(checksums for _, _, checksums in files), tables.WORD),
        )

    def _add(self, number: int, chunks: Sequence[_Stored]) -> int:
        """Adds the chunks of an array and where they are; returns how they are arranged."""
        array = self._tree.arrays[number]
        shape = array.storage_shape
        item_bytes = dtypes.of_stored(array).storage_item_bytes
        boxes = [chunk.box for chunk in chunks]
        if any(grid.volume(chunk.box) * item_bytes != chunk.nbytes for chunk in chunks):
            raise Corrupt(
                "a box of an array has another length than its shape", array=self._tree.labels[number]
            )
        found = grid.find_grid(shape, boxes) if boxes else None
        if found is not None:
            self._chunks += [chunks[place] for place in found[1].tolist()]
            self._dims += [*shape, *found[0].chunk_shape]
            return tables.REGULAR
        if not boxes and not all(shape):
            self._dims += [*shape, *shape]
            return tables.REGULAR
        kind = self._kind(number, boxes)
        irregular, order = grid.IrregularBoxes.sort(boxes, len(shape))
        self._chunks += [chunks[place] for place in order.tolist()]
        self._dims += [*shape, *irregular.to_words().tolist()]
        return kind

    def _kind(self, number: int, boxes: Sequence[grid.Box]) -> int:
        shape = self._tree.arrays[number].storage_shape
        kind, defect = tables.IRREGULAR, grid.find_cover_defect(shape, boxes)
        if defect is not None and defect.kind == "hole" and not self._are_all:
            kind, defect = tables.PARTIAL, grid.find_cover_defect(shape, boxes, holes_allowed=True)
        if defect is None:
            return kind
        offset, extent = defect.box
        spans = zip(offset, extent, strict=True)
        where = ", ".join(f"{begin}:{begin + length}" for begin, length in spans)
        what = {"hole": "is in no slot", "overlap": "is in several slots", "outside": "lies outside of it"}
        raise Corrupt(
            f"the part [{where}] of an array of shape {shape} {what[defect.kind]} of the memory tier",
            array=self._tree.labels[number],
        )


def _file_entries(files: Sequence[File]) -> tables.Table:
    entries = np.zeros(len(files), tables.FILE_ENTRY)
    entries["process"] = range(len(files))
    entries["file_bytes"] = [nbytes for _, nbytes, _ in files]
    entries["first_block"] = tables.first_blocks(entries["file_bytes"])
    return entries


def _chunk_entries(chunks: Sequence[_Stored]) -> tables.Table:
    entries = np.zeros(len(chunks), tables.CHUNK_ENTRY)
    entries["file"] = [chunk.file for chunk in chunks]
    entries["offset"] = [chunk.offset for chunk in chunks]
    entries["length"] = [chunk.nbytes for chunk in chunks]
    return entries
