"""The regular grid of chunks: chunk i of an array by arithmetic alone.

Invariants: chunks are numbered in row-major order of the grid; those at the far edges are clipped to the
array; an array with a zero extent has no chunks; an array without axes has one. Finding the chunks that meet
a box costs as much as there are such chunks, never as there are chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from waystation._errors import InvalidInput
from waystation.grid._boxes import Box, BoxArray, Shape, box_array, whole


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """An array cut into chunks of one shape.

    Attributes:
        array_shape: The shape of the array.
        chunk_shape: The shape of every chunk but those that the edge clips; no extent is zero.
        counts: The number of chunks along each axis.
    """

    array_shape: Shape
    chunk_shape: Shape
    counts: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.array_shape) != len(self.chunk_shape):
            raise InvalidInput(
                f"chunks of shape {self.chunk_shape} do not fit an array of shape {self.array_shape}: "
                "give both as many axes"
            )
        if any(extent < 0 for extent in self.array_shape) or any(extent < 1 for extent in self.chunk_shape):
            raise InvalidInput(
                f"cannot cut an array of shape {self.array_shape} into chunks of shape {self.chunk_shape}; "
                "extents of chunks begin at 1, those of arrays at 0"
            )
        along_axes = zip(self.array_shape, self.chunk_shape, strict=True)
        object.__setattr__(self, "counts", tuple(-(-extent // step) for extent, step in along_axes))

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return math.prod(self.counts)

    def box(self, index: int) -> Box:
        """The box of chunk `index`.

        Raises:
            InvalidInput: There is no such chunk.
        """
        if not 0 <= index < self.chunk_count:
            raise InvalidInput(f"there is no chunk {index} among {self.chunk_count}")
        offset = []
        for count, step in zip(reversed(self.counts), reversed(self.chunk_shape), strict=True):
            index, place = divmod(index, count)
            offset.append(place * step)
        offset.reverse()
        ends = zip(offset, self.chunk_shape, self.array_shape, strict=True)
        return tuple(offset), tuple(min(step, extent - begin) for begin, step, extent in ends)

    def boxes(self) -> BoxArray:
        """The boxes of all chunks, in order."""
        places = np.indices(self.counts, dtype=np.int64).reshape(len(self.counts), self.chunk_count).T
        offsets = places * np.array(self.chunk_shape, dtype=np.int64)
        shapes = np.minimum(self.chunk_shape, np.array(self.array_shape, dtype=np.int64) - offsets)
        return np.stack([offsets, shapes], axis=1)

    def volumes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of elements of each of these chunks."""
        found = np.ones(len(numbers), np.int64)
        rest = numbers
        for count, step, extent in zip(
            reversed(self.counts), reversed(self.chunk_shape), reversed(self.array_shape), strict=True
        ):
            rest, place = np.divmod(rest, count)
            found *= np.minimum(step, extent - place * step)
        return found

    def meeting(self, box: Box) -> list[tuple[int, Box]]:
        """The chunks that share elements with `box`, ascending: number and box of each."""
        return self._meeting(box, clipped=False)

    def count_meeting(self, box: Box) -> int:
        """How many chunks share elements with `box`."""
        count = 1
        for begin, extent, array_extent, step in zip(*box, self.array_shape, self.chunk_shape, strict=True):
            first, end = max(begin, 0), min(begin + extent, array_extent)
            if first >= end:
                return 0
            count *= (end - 1) // step - first // step + 1
        return count

    def meeting_in_bulk(self, box: Box) -> tuple[NDArray[np.int64], BoxArray]:
        """What `meeting` finds, as the numbers and boxes of all: quicker where these are many."""
        ndim = len(self.array_shape)
        counts, axes = [], []
        for begin, extent, array_extent, step in zip(*box, self.array_shape, self.chunk_shape, strict=True):
            first, end = max(begin, 0), min(begin + extent, array_extent)
            places = np.arange(first // step, (end - 1) // step + 1 if first < end else first // step)
            counts.append(len(places))
            axes.append((places, places * step, np.minimum(step, array_extent - places * step)))
        numbers = np.zeros(counts, np.int64)
        boxes = np.empty((*counts, 2, ndim), np.int64)
        stride = self.chunk_count
        for axis, (places, begins, extents) in enumerate(axes):
            stride //= max(1, self.counts[axis])
            along = (-1,) + (1,) * (ndim - 1 - axis)
            numbers += (places * stride).reshape(along)
            boxes[..., 0, axis] = begins.reshape(along)
            boxes[..., 1, axis] = extents.reshape(along)
        return numbers.reshape(-1), boxes.reshape(numbers.size, 2, ndim)

    def overlaps(self, box: Box) -> list[tuple[int, Box]]:
        """The same chunks: number of each, and the box of what it shares."""
        return self._meeting(box, clipped=True)

    def _meeting(self, box: Box, clipped: bool) -> list[tuple[int, Box]]:
        axes = []
        stride = self.chunk_count
        for begin, extent, array_extent, step, count in zip(
            *box, self.array_shape, self.chunk_shape, self.counts, strict=True
        ):
            first, end = max(begin, 0), min(begin + extent, array_extent)
            if first >= end:
                return []
            stride //= count
            low, high = (first, end) if clipped else (0, array_extent)
            places = range(first // step, (end - 1) // step + 1)
            axes.append([_span(place, step, low, high, stride) for place in places])
        return [
            (
                sum(part for part, _, _ in spans),
                (tuple(begin for _, begin, _ in spans), tuple(extent for _, _, extent in spans)),
            )
            for spans in product(*axes)
        ]


def _span(place: int, step: int, low: int, high: int, stride: int) -> tuple[int, int, int]:
    """A chunk along one axis: its part of the number, begin and extent within `[low, high)`."""
    begin = max(low, place * step)
    return place * stride, begin, min(high, (place + 1) * step) - begin


def find_grid(
    array_shape: Shape, boxes: Sequence[Box] | BoxArray
) -> tuple[ChunkGrid, NDArray[np.int64]] | None:
    """The regular grid that the boxes are, in any order, if they are one.

    Returns:
        The grid and, for each chunk in order, the place of its box among `boxes`; None if the boxes are
        not exactly the chunks of one grid.
    """
    if len(boxes) == 1 and not isinstance(boxes, np.ndarray) and boxes[0] == whole(array_shape):
        shape = tuple(max(1, extent) for extent in array_shape)
        return (ChunkGrid(array_shape, shape), np.zeros(1, dtype=np.int64)) if shape == array_shape else None
    made = box_array(boxes, len(array_shape))
    grid = _candidate(array_shape, made)
    if grid is None or grid.chunk_count != len(made):
        return None
    offsets, shapes = made[:, 0], made[:, 1]
    steps = np.array(grid.chunk_shape, dtype=np.int64)
    extents = np.array(array_shape, dtype=np.int64)
    if (offsets < 0).any() or (offsets >= extents).any() or (offsets % steps).any():
        return None
    if (shapes != np.minimum(steps, extents - offsets)).any():
        return None
    indices = (offsets // steps) @ _strides(grid.counts)
    order = np.full(len(made), -1, dtype=np.int64)
    order[indices] = np.arange(len(made))
    return (grid, order) if (order >= 0).all() else None


def _candidate(array_shape: Shape, boxes: BoxArray) -> ChunkGrid | None:
    """The only grid that the boxes can be: that of the chunk at the origin."""
    at_origin = boxes[~boxes[:, 0].any(axis=1), 1]
    if not len(boxes):
        return ChunkGrid(array_shape, tuple(max(1, extent) for extent in array_shape))
    if len(at_origin) != 1 or (at_origin < 1).any():
        return None
    return ChunkGrid(array_shape, tuple(at_origin[0].tolist()))


def _strides(counts: Shape) -> NDArray[np.int64]:
    return np.array([math.prod(counts[axis + 1 :]) for axis in range(len(counts))], dtype=np.int64)
