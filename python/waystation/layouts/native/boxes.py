"""From boxes of arrays to the engine's read plan.

A whole array stored as one chunk is one fixed record; these are the many, so they are made in one
vectorised step. Every other box becomes one record per chunk that it meets: first the chunks of all boxes are
found, then their places, so that tables that are read page by page are read in few calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from waystation import grid
from waystation._collection import paused_collection
from waystation._distinct import distinct
from waystation._errors import Corrupt, InvalidInput, WaystationError
from waystation.frameworks.base import StoredArray
from waystation.grid import Box
from waystation.layouts.native import places, tables
from waystation.layouts.opened import Request

if TYPE_CHECKING:
    from waystation.frameworks.dtypes import LogicalDtype


class MissingBox(InvalidInput):
    """A host's part of a checkpoint in local storage lacks something that is to be read.

    Attributes:
        array: The number of the array.
        box: What is missing of it, the first if there is more; in terms of its storage.
    """

    array = -1
    box: Box = ((), ())


class _Piece(NamedTuple):
    """What a box takes of one chunk."""

    array: int
    chunk: int
    chunk_box: Box
    common: Box
    box: Box
    address: int


@paused_collection()
def read_words(
    decoded: tables.Tables,
    requests: Sequence[Request],
    forms: Sequence[LogicalDtype],
    addresses: Sequence[int],
    sizes: Sequence[int],
    stored: Sequence[StoredArray],
    labels: Sequence[str],
    found: list[list[Box]] | None = None,
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Plans the read of every box of every request into buffers given by address and bytes, in order.

    Args:
        decoded: The tables.
        requests: What is to be read.
        forms: The dtypes of the arrays requested.
        addresses: Where each box goes.
        sizes: Its bytes.
        stored: What the tree says of all arrays.
        labels: Their key paths.
        found: Where given, boxes may have holes: a list for each box, to which the parts of it that are read
            are added, in terms of the storage of its array.

    Returns:
        The records of `_native.start_read`, and the numbers of the files that they use: records
        count files by their place in that list.

    Raises:
        Corrupt: The tables contradict the tree or each other.
        MissingBox: The tables are those of one host's storage, which holds only a part of a box.
    """
    shapes = _Shapes(decoded, [request.array for request in requests], stored, labels)
    whole: list[tuple[int, int, int]] = []
    pieces: list[_Piece] = []
    position = 0
    for request, form in zip(requests, forms, strict=True):
        array = request.array
        single = array in shapes.single_chunks
        for number, box in enumerate(request.boxes):
            if request.missing is None and single and box[1] + form.trailing == shapes.array[array]:
                if sizes[position]:
                    whole.append((shapes.single_chunks[array], addresses[position], sizes[position]))
                    if found is not None:
                        found[position].append((box[0] + (0,) * len(form.trailing), shapes.array[array]))
            else:
                storage_box = (box[0] + (0,) * len(form.trailing), box[1] + form.trailing)
                if grid.volume(storage_box) * shapes.item_bytes[array] != sizes[position]:
                    raise Corrupt(f"array {array} has another item size in the chunk table than in the tree")
                if sizes[position]:
                    try:
                        parts = [storage_box] if request.missing is None else request.missing[number]
                        own = _pieces(decoded, shapes, array, storage_box, parts, addresses[position])
                        if found is None:
                            _check_covered(shapes.kind[array], array, storage_box, parts, own)
                        else:
                            found[position] += (piece.common for piece in own)
                    except WaystationError as error:
                        raise error.where(array=labels[array])
                    pieces += own
            position += 1
    return _with_file_numbers(_whole_words(decoded, whole), _words(decoded, shapes, pieces))


class _Shapes:
    """What the tables say of the arrays that are wanted, as plain values: one conversion of a column instead
    of one per access."""

    def __init__(
        self,
        decoded: tables.Tables,
        wanted: Sequence[int],
        stored: Sequence[StoredArray],
        labels: Sequence[str],
    ) -> None:
        numbers = distinct(np.asarray(wanted, np.int64))
        entries = decoded.arrays[numbers]
        has_grid = (entries["kind"] == tables.REGULAR) | (entries["kind"] == tables.RUNS)
        ndims = entries["ndim"].astype(np.int64)
        widths = ndims * (1 + has_grid)
        begins = np.cumsum(widths) - widths
        firsts = entries["first_dim"].astype(np.int64)
        words = decoded.dims[np.repeat(firsts - begins, widths) + np.arange(int(widths.sum()))].tolist()
        _prefetch_boxes(decoded, entries[~has_grid])
        self.kind = dict(zip(numbers.tolist(), entries["kind"].tolist(), strict=True))
        self.item_bytes = dict(zip(numbers.tolist(), (entries["item_bits"] // 8).tolist(), strict=True))
        self.array: dict[int, tuple[int, ...]] = {}
        self.chunk: dict[int, tuple[int, ...]] = {}
        self.single_chunks: dict[int, int] = {}  # of each array that is one chunk, the place of its entry
        is_listed_once = ((entries["kind"] == tables.REGULAR) & (entries["chunk_count"] == 1)).tolist()
        rows = zip(
            numbers.tolist(),
            begins.tolist(),
            ndims.tolist(),
            (begins + widths).tolist(),
            is_listed_once,
            entries["first_chunk"].tolist(),
            strict=True,
        )
        for array, begin, ndim, end, is_once, first_chunk in rows:
            shape = tuple(words[begin : begin + ndim])
            if shape != stored[array].storage_shape:
                raise Corrupt(
                    "the chunk table and the tree differ in an array's shape",
                    array=labels[array],
                )
            self.array[array] = shape
            self.chunk[array] = tuple(words[begin + ndim : end])
            if 0 in self.chunk[array] and 0 not in shape:
                raise Corrupt("the chunks of an array have an extent of 0", array=labels[array])
            if is_once and self.chunk[array] == shape:
                self.single_chunks[array] = first_chunk


def _prefetch_boxes(decoded: tables.Tables, entries: tables.Table) -> None:
    """Reads the bounding boxes of the groups of arrays in boxes."""
    ndims, counts = entries["ndim"].astype(np.int64), entries["chunk_count"].astype(np.int64)
    begins = entries["first_dim"].astype(np.int64) + ndims
    places.prefetch(decoded.dims, begins, begins + 2 * ndims * -(-counts // grid.GROUP_BOXES))


def _whole_words(decoded: tables.Tables, whole: Sequence[tuple[int, int, int]]) -> np.ndarray[Any, Any]:
    records = np.zeros((len(whole), 5), np.int64)
    if whole:
        chosen = np.asarray(whole, np.int64)
        chunks = decoded.chunks[chosen[:, 0]]
        if np.any(chunks["length"] != chosen[:, 2]):
            raise Corrupt("a chunk has a length that does not fit the shape of its array")
        records[:, 0] = chunks["file"]
        records[:, 1] = chunks["offset"]
        records[:, 2] = chunks["length"]
        records[:, 4] = chosen[:, 1]
        places.check_inside(decoded, records[:, 0], records[:, 1], records[:, 2])
    return records


def _pieces(
    decoded: tables.Tables, shapes: _Shapes, array: int, box: Box, parts: Sequence[Box], address: int
) -> list[_Piece]:
    """What the parts of one box take of each chunk that they meet."""
    return [
        _Piece(array, number, chunk_box, common, box, address)
        for part in parts
        for number, chunk_box in _chunks_meeting(decoded, shapes, array, part)
        if (common := grid.intersect(chunk_box, part)) is not None
    ]


def _check_covered(kind: int, array: int, box: Box, parts: Sequence[Box], pieces: Sequence[_Piece]) -> None:
    if sum(grid.volume(piece.common) for piece in pieces) != sum(map(grid.volume, parts)):
        raise _not_covered(kind, array, box, [piece.common for piece in pieces])


def _chunks_meeting(decoded: tables.Tables, shapes: _Shapes, array: int, box: Box) -> list[tuple[int, Box]]:
    if shapes.kind[array] in (tables.REGULAR, tables.RUNS):
        return grid.chunks_meeting(shapes.array[array], shapes.chunk[array], box)
    entry = decoded.arrays[array]
    begin = int(entry["first_dim"]) + int(entry["ndim"])
    return grid.irregular_chunks_meeting(decoded.dims, int(entry["chunk_count"]), box, begin)


def _not_covered(kind: int, array: int, box: Box, present: Sequence[Box]) -> WaystationError:
    """Why a box cannot be read, of which only some parts are there."""
    if kind != tables.PARTIAL:
        return Corrupt(f"the chunks of array {array} leave a hole in it")
    defect = grid.find_cover_defect(box[1], [grid.relative_to(part, box[0]) for part in present])
    assert defect is not None, "boxes with fewer elements than theirs leave a hole, or overlap"
    offset = tuple(start + at for start, at in zip(box[0], defect.box[0], strict=True))
    shown = ", ".join(
        f"{begin}:{begin + extent}" for begin, extent in zip(offset, defect.box[1], strict=True)
    )
    error = MissingBox(
        f"this host's part of a checkpoint in local storage does not have [{shown}] of array {array}; load "
        "it with the same devices on the same hosts as it was saved, or save to storage that all hosts share"
    )
    error.array, error.box = array, (offset, defect.box[1])
    return error


def is_held(
    decoded: tables.Tables, array: int, box: Box, stored: Sequence[StoredArray], labels: Sequence[str]
) -> bool:
    """Whether all of a box of an array, in terms of its storage, can be read."""
    shapes = _Shapes(decoded, [array], stored, labels)
    parts = [grid.intersect(found, box) for _, found in _chunks_meeting(decoded, shapes, array, box)]
    return sum(grid.volume(part) for part in parts if part is not None) == grid.volume(box)


def _words(decoded: tables.Tables, shapes: _Shapes, pieces: Sequence[_Piece]) -> list[int]:
    """A record for each piece."""
    if not pieces:
        return []
    lengths = [grid.volume(piece.chunk_box) * shapes.item_bytes[piece.array] for piece in pieces]
    columns = [piece.array for piece in pieces], [piece.chunk for piece in pieces], lengths
    files, offsets = places.find_places(decoded, *(np.asarray(column, np.int64) for column in columns))
    words: list[int] = []
    for piece, file, offset in zip(pieces, files.tolist(), offsets.tolist(), strict=True):
        item_bytes = shapes.item_bytes[piece.array]
        strides = grid.contiguous_strides(piece.box[1], item_bytes)
        begin, shape = piece.common
        place = piece.address + sum(
            (at - start) * stride for at, start, stride in zip(begin, piece.box[0], strides, strict=True)
        )
        words += (file, offset, item_bytes, len(shape), *piece.chunk_box[1])
        words += (at - start for at, start in zip(begin, piece.chunk_box[0], strict=True))
        words += (*shape, place, *strides)
    return words


def _with_file_numbers(
    whole: np.ndarray[Any, Any], words: list[int]
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Joins the records and renumbers their files to those that are used."""
    positions = []
    position = 0
    while position < len(words):
        positions.append(position)
        position += 5 + 4 * words[position + 3]
    used = sorted({*distinct(whole[:, 0]).tolist(), *(words[position] for position in positions)})
    numbers = {file: number for number, file in enumerate(used)}
    for position in positions:
        words[position] = numbers[words[position]]
    whole[:, 0] = np.searchsorted(used, whole[:, 0]) if used else 0
    return np.concatenate([whole.ravel(), np.asarray(words, np.int64)]), used
