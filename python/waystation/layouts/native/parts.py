"""What each process says about the files that it has written, for the primary to merge.

Processes of a large program say nearly the same: the same arrays in the same order, boxes of the same
shapes; only where their boxes begin differs. So a part is cut in two. Its *recipe* is what others share: it
is encoded to equal bytes where it is equal, and is looked at once. The rest is small: files, offsets,
checksums. Offsets in files are not said at all: where chunks do not follow each other, because a file that is
shared with an earlier checkpoint has dead weight, the recipe says how many bytes are in between.

Invariants: a part is only ever read by the save that wrote it, so its encoding has no version; chunks stand
in the order of their bytes, those without bytes not at all.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from waystation._errors import Corrupt
from waystation.layouts.native import tables
from waystation.layouts.native.chunks import Chunk, Chunks
from waystation.layouts.native.records import DataPlace, dump_json
from waystation.layouts.native.write_plan import WritePlan, places_of

WHOLE = -1  # the box of a chunk that is a whole array

_NUMBER = np.dtype("<i4")
_EXTENT = np.dtype("<i8")
_PART_SECTIONS: tuple[np.dtype[Any], ...] = (
    tables.FILE_ENTRY,
    np.dtype("u1"),
    _EXTENT,
    tables.WORD,
    np.dtype("u1"),
)
_RECIPE_SECTIONS: tuple[np.dtype[Any], ...] = (_NUMBER, _NUMBER, _NUMBER, _NUMBER, _EXTENT, _EXTENT)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a part has in common with others.

    Attributes:
        chunk_counts: How many chunks are in each file.
        arrays: The array of each chunk.
        boxes: The box of each chunk, among the distinct ones, or `WHOLE`.
        ndims: Dimensions of each distinct box.
        extents: Shapes of the distinct boxes, one after another.
        dead: Bytes of no chunk: before each chunk, since the one before it in its file or the header; then,
            of each file, after its last chunk. Empty where there are none at all.
    """

    chunk_counts: tables.Table
    arrays: tables.Table
    boxes: tables.Table
    ndims: tables.Table
    extents: tables.Table
    dead: tables.Table

    def encode(self) -> bytes:
        """As bytes, the same for the same recipe."""
        steps = np.diff(self.arrays, prepend=0)  # nearly all of them alike, unlike the numbers themselves
        columns = (self.chunk_counts, steps, self.boxes, self.ndims, self.extents, self.dead)
        sections = [
            np.asarray(column, form).tobytes() for column, form in zip(columns, _RECIPE_SECTIONS, strict=True)
        ]
        return zlib.compress(_join(sections), 1)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads what `encode` made."""
        try:
            counts, steps, *rest = _split(zlib.decompress(data), _RECIPE_SECTIONS)
        except zlib.error as error:
            raise Corrupt(f"what a process wrote about its files is damaged: {error}") from error
        return cls(counts, np.cumsum(steps, dtype=np.int64), *rest)


@dataclass(slots=True)
class Part:
    """What one process has written.

    Attributes:
        files: `FILE_ENTRY` of each file.
        recipe: An encoded `Recipe`.
        offsets: Where the distinct boxes of the recipe begin, one after another, int64.
        checksums: Of each block of each file, uint64.
        places: Where files are that are not in the directory of the state; locations count them from 1.
    """

    files: tables.Table
    recipe: bytes
    offsets: tables.Table
    checksums: tables.Table
    places: tuple[DataPlace, ...] = ()

    @classmethod
    def of(cls, plan: WritePlan, chunks: Sequence[Chunk], checksums: Sequence[bytes]) -> Part:
        """What has been written by a plan, with the checksums that the writing yielded."""
        columns = Chunks.of(chunks)
        kept = np.flatnonzero(columns.lengths > 0)
        entries = plan.chunk_entries[kept]
        order = kept[np.lexsort((entries["offset"], entries["file"]))]
        distinct: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        boxes = np.full(len(order), WHOLE, np.int64)
        for number in np.flatnonzero(~columns.are_whole()[order]).tolist():
            chunk = columns.others[int(order[number])]
            assert chunk.offset is not None, "it is no whole array"
            boxes[number] = distinct.setdefault((chunk.offset, chunk.shape), len(distinct))
        recipe = Recipe(
            np.bincount(entries["file"].astype(np.int64), minlength=len(plan.file_entries)),
            columns.arrays[order],
            boxes,
            np.array([len(shape) for _, shape in distinct], np.int64),
            np.array([extent for _, shape in distinct for extent in shape], np.int64),
            _dead(plan.file_entries, plan.chunk_entries[order]),
        )
        offsets = np.array([begin for offset, _ in distinct for begin in offset], np.int64)
        sums = np.frombuffer(b"".join(checksums), "<u8")
        return cls(plan.file_entries, recipe.encode(), offsets, sums, tuple(places_of(plan.shared)))

    def encode(self) -> bytes:
        """As bytes: the lengths of the sections, then these."""
        places = dump_json([place.to_json() for place in self.places])
        return _join(
            [self.files.tobytes(), self.recipe, self.offsets.tobytes(), self.checksums.tobytes(), places]
        )

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Reads what `encode` made.

        Raises:
            Corrupt: It did not make these bytes.
        """
        files, recipe, offsets, checksums, places = _split(data, _PART_SECTIONS)
        listed = json.loads(places.tobytes())
        return cls(files, recipe.tobytes(), offsets, checksums, tuple(map(DataPlace.from_json, listed)))


def _dead(files: tables.Table, chunks: tables.Table) -> tables.Table:
    """The bytes of no chunk, see `Recipe`, given the chunks in the order of their bytes."""
    of_chunks = chunks["file"].astype(np.int64)
    begins, lengths = chunks["offset"].astype(np.int64), chunks["length"].astype(np.int64)
    ends = files["data_start"].astype(np.int64)  # of what is before, in each file
    before = np.empty(len(chunks), np.int64)
    is_first = np.diff(of_chunks, prepend=-1) != 0
    before[is_first] = ends[of_chunks[is_first]]
    before[~is_first] = (begins + lengths)[:-1][~is_first[1:]]
    is_last = np.diff(of_chunks, append=-1) != 0
    ends[of_chunks[is_last]] = (begins + lengths)[is_last]
    dead: tables.Table = np.concatenate([begins - before, files["file_bytes"].astype(np.int64) - ends])
    return dead if dead.any() else dead[:0]


def _join(sections: Sequence[bytes]) -> bytes:
    return np.array([len(section) for section in sections], "<i8").tobytes() + b"".join(sections)


def _split(data: bytes, forms: Sequence[np.dtype[Any]]) -> list[tables.Table]:
    """The sections that `_join` joined."""
    begin = 8 * len(forms)
    lengths = np.frombuffer(data[:begin], "<i8").tolist() if len(data) >= begin else [-1]
    is_whole = all(
        length >= 0 and length % form.itemsize == 0 for length, form in zip(lengths, forms, strict=False)
    )
    if not is_whole or begin + sum(lengths) != len(data):
        raise Corrupt(f"{len(data)} bytes are not what a process wrote about its files")
    found = []
    for length, form in zip(lengths, forms, strict=True):
        found.append(np.frombuffer(data, form, length // form.itemsize, begin))
        begin += length
    return found


def box_volumes(recipe: Recipe) -> list[int]:
    """The number of elements of each distinct box."""
    extents, begin, found = recipe.extents.tolist(), 0, []
    for ndim in recipe.ndims.tolist():
        found.append(math.prod(extents[begin : begin + ndim]))
        begin += ndim
    return found
