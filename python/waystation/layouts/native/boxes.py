"""From boxes of arrays to the engine's read plan.

A whole array stored as one chunk is one fixed record; these are the many, so they are made in one
vectorised step. Every other box becomes one record per chunk that it meets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from waystation import grid
from waystation._collection import paused_collection
from waystation._errors import Corrupt
from waystation.layouts.native import tables

if TYPE_CHECKING:
    from waystation.frameworks.dtypes import LogicalDtype
    from waystation.layouts.native.read import Request

Box = tuple[tuple[int, ...], tuple[int, ...]]


@paused_collection()
def read_words(
    decoded: tables.Tables,
    requests: Sequence[Request],
    forms: Sequence[LogicalDtype],
    addresses: Sequence[int],
    sizes: Sequence[int],
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Plans the read of every box of every request into buffers given by address and bytes, in order.

    Returns:
        The records of `_native.start_read`, and the numbers of the files that they use: records
        count files by their place in that list.

    Raises:
        Corrupt: The tables ask for more or fewer bytes than an array has.
    """
    shapes = _Shapes(decoded)
    whole: list[tuple[int, int, int]] = []
    words: list[int] = []
    position = 0
    for request, form in zip(requests, forms, strict=True):
        array = request.array
        single = shapes.is_single_chunk[array]
        for box in request.boxes:
            if single and box[1] + form.trailing == shapes.array[array]:
                if sizes[position]:
                    whole.append((shapes.first_chunk[array], addresses[position], sizes[position]))
            else:
                storage_box = (box[0] + (0,) * len(form.trailing), box[1] + form.trailing)
                if grid.volume(storage_box) * shapes.item_bytes[array] != sizes[position]:
                    raise Corrupt(f"array {array} has another item size in the chunk table than in the tree")
                if sizes[position]:
                    words += _box_words(decoded, shapes, array, storage_box, addresses[position])
            position += 1
    return _with_file_numbers(_whole_words(decoded, whole), words)


class _Shapes:
    """The columns of the array table as plain lists: one conversion instead of one per access."""

    def __init__(self, decoded: tables.Tables) -> None:
        entries = decoded.arrays
        self.kind = entries["kind"].tolist()
        self.is_single_chunk = _are_single_chunks(decoded).tolist()
        self.first_chunk = entries["first_chunk"].tolist()
        self.item_bytes = (entries["item_bits"] // 8).tolist()
        dims = decoded.dims.tolist()
        rows = zip(entries["first_dim"].tolist(), entries["ndim"].tolist(), strict=True)
        self.array = [tuple(dims[first : first + ndim]) for first, ndim in rows]


def _are_single_chunks(decoded: tables.Tables) -> np.ndarray[Any, Any]:
    """Of each array whether one chunk holds all of it."""
    entries, dims = decoded.arrays, decoded.dims
    ndims, firsts = entries["ndim"].astype(np.int64), entries["first_dim"].astype(np.int64)
    single: np.ndarray[Any, Any] = (entries["kind"] == tables.REGULAR) & (entries["chunk_count"] == 1)
    # The extents of all these arrays, one after another, and those of their chunks.
    owners = np.repeat(np.flatnonzero(single), ndims[single])
    before = np.cumsum(ndims[single]) - ndims[single]
    axes = np.arange(len(owners)) - np.repeat(before, ndims[single])
    differ = dims[firsts[owners] + axes] != dims[firsts[owners] + ndims[owners] + axes]
    single[owners[differ]] = False
    return single


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
    return records


def _box_words(decoded: tables.Tables, shapes: _Shapes, array: int, box: Box, address: int) -> list[int]:
    """Records for one box: one for each chunk that it meets."""
    item_bytes = shapes.item_bytes[array]
    ndim = len(shapes.array[array])
    strides = _strides(box[1], item_bytes)
    words: list[int] = []
    covered = 0
    for number, chunk_box in _chunks_meeting(decoded, shapes, array, box):
        common = grid.intersect(chunk_box, box)
        if common is None:
            continue
        entry = decoded.chunks[shapes.first_chunk[array] + number]
        if int(entry["length"]) != grid.volume(chunk_box) * item_bytes:
            raise Corrupt(f"chunk {number} of array {array} has a length that does not fit its shape")
        offset, shape = common
        place = address + sum(
            (at - start) * stride for at, start, stride in zip(offset, box[0], strides, strict=True)
        )
        words += (int(entry["file"]), int(entry["offset"]), item_bytes, ndim, *chunk_box[1])
        words += (at - start for at, start in zip(offset, chunk_box[0], strict=True))
        words += (*shape, place, *strides)
        covered += grid.volume(common)
    if covered != grid.volume(box):
        raise Corrupt(f"the chunks of array {array} leave a hole in it")
    return words


def _chunks_meeting(decoded: tables.Tables, shapes: _Shapes, array: int, box: Box) -> list[tuple[int, Box]]:
    if shapes.kind[array] == tables.REGULAR:
        return list(grid.chunks_meeting(shapes.array[array], decoded.chunk_shape(array), box))
    entry = decoded.arrays[array]
    first = int(entry["first_dim"]) + int(entry["ndim"])
    last = int(entry["first_dim"]) + int(entry["dim_count"])
    return list(grid.irregular_chunks_meeting(decoded.dims[first:last], int(entry["chunk_count"]), box))


def _strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    strides, step = [], item_bytes
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _with_file_numbers(
    whole: np.ndarray[Any, Any], words: list[int]
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Joins the records and renumbers their files to those that are used."""
    positions = []
    position = 0
    while position < len(words):
        positions.append(position)
        position += 5 + 4 * words[position + 3]
    used = sorted({*np.unique(whole[:, 0]).tolist(), *(words[position] for position in positions)})
    numbers = {file: number for number, file in enumerate(used)}
    for position in positions:
        words[position] = numbers[words[position]]
    whole[:, 0] = np.searchsorted(used, whole[:, 0]) if used else 0
    return np.concatenate([whole.ravel(), np.asarray(words, np.int64)]), used
