"""Boxes: axis-aligned blocks of an array, as `(offset, shape)`.

Invariants: plain integers and tuples; a box of an array without axes is `((), ())` and holds one element; a
box with a zero extent is empty and meets nothing. `BoxArray` is the same in bulk: int64 of shape
`(boxes, 2, ndim)`, the offset before the shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation._errors import InvalidInput

Shape: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[Shape, Shape]
BoxArray: TypeAlias = NDArray[np.int64]


def volume(box: Box) -> int:
    """The number of elements."""
    return math.prod(box[1])


def contiguous_strides(shape: Sequence[int], item_bytes: int) -> Shape:
    """Bytes from one element to the next along each axis of an array in C order."""
    strides, step = [], item_bytes
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def contiguous_span(shape: Shape, box: Box) -> tuple[int, int] | None:
    """Where the elements of a box begin in an array in C order, and how many there are.

    None where they do not lie one after another.
    """
    offset, extents = box
    first, step = 0, 1
    is_cut = False  # an axis further in is not taken whole
    for begin, extent, length in zip(reversed(offset), reversed(extents), reversed(shape), strict=True):
        if is_cut and extent > 1:
            return None
        is_cut = is_cut or extent != length
        first += begin * step
        step *= length
    return first, math.prod(extents)


def intersect(first: Box, second: Box) -> Box | None:
    """The elements that both boxes hold; None if there are none."""
    offset = tuple(map(max, first[0], second[0]))
    shape = tuple(
        min(begin_1 + extent_1, begin_2 + extent_2) - begin
        for begin, begin_1, extent_1, begin_2, extent_2 in zip(offset, *first, *second, strict=True)
    )
    return (offset, shape) if all(extent > 0 for extent in shape) else None


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """What is left of a box without some others, as boxes that do not overlap."""
    left = [box]
    for other in others:
        left = [rest for part in left for rest in _without(part, other)]
    return left


def _without(box: Box, other: Box) -> list[Box]:
    common = intersect(box, other)
    if common is None:
        return [box]
    rest: list[Box] = []
    (offset, shape), (common_offset, common_shape) = box, common
    for axis, (start, extent) in enumerate(zip(offset, shape, strict=True)):
        inner, end = common_offset[axis], common_offset[axis] + common_shape[axis]
        # Along the axes before this one, what is left lies beside the common part no more.
        before, after = common_offset[:axis], common_shape[:axis]
        for begin, stop in ((start, inner), (end, start + extent)):
            if begin < stop:
                rest.append(
                    ((*before, begin, *offset[axis + 1 :]), (*after, stop - begin, *shape[axis + 1 :]))
                )
    return rest


def contains(outer: Box, inner: Box) -> bool:
    """Whether `inner` lies within the bounds of `outer`; an empty box has to lie there as well."""
    return all(
        begin_1 <= begin_2 and begin_2 + extent_2 <= begin_1 + extent_1
        for begin_1, extent_1, begin_2, extent_2 in zip(*outer, *inner, strict=True)
    )


def relative_to(box: Box, origin: Sequence[int]) -> Box:
    """The same elements counted from `origin`."""
    return tuple(begin - zero for begin, zero in zip(box[0], origin, strict=True)), box[1]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return (0,) * len(shape), tuple(shape)


def box_of_slices(slices: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that slices of step 1 select from an array, as JAX's shardings name the shard of a device.

    Raises:
        InvalidInput: A slice has another step, or there is not one slice for each axis.
    """
    if len(slices) != len(shape):
        raise InvalidInput(f"{len(slices)} slices were given for an array of {len(shape)} axes")
    bounds = [part.indices(extent) for part, extent in zip(slices, shape, strict=True)]
    if any(step != 1 for _, _, step in bounds):
        raise InvalidInput(f"cannot make a box of the slices {tuple(slices)!r}; use slices of step 1")
    return tuple(begin for begin, _, _ in bounds), tuple(max(0, end - begin) for begin, end, _ in bounds)


def slices_of_box(box: Box) -> tuple[slice, ...]:
    """What selects the box from its array: `array[slices_of_box(box)]`."""
    return tuple(slice(begin, begin + extent) for begin, extent in zip(*box, strict=True))


def box_array(boxes: Sequence[Box] | BoxArray, ndim: int) -> BoxArray:
    """Boxes in bulk.

    Raises:
        InvalidInput: A box has not `ndim` axes, or a number does not fit 64 bits.
    """
    if isinstance(boxes, np.ndarray) and boxes.shape[1:] == (2, ndim):
        return boxes
    try:
        made = np.array(boxes, dtype=np.int64)
        return made.reshape(len(boxes), 2, ndim)
    except (OverflowError, ValueError):
        raise InvalidInput(f"boxes must have {ndim} axes and 64-bit integers") from None


def box_at(boxes: BoxArray, position: int) -> Box:
    """One of the boxes."""
    offset, shape = boxes[position].tolist()
    return tuple(offset), tuple(shape)


def positions_meeting(boxes: BoxArray, box: Box) -> NDArray[np.int64]:
    """The places of the boxes that share elements with `box`, ascending."""
    begin, extent = np.array(box, dtype=np.int64).reshape(2, -1)
    if not extent.all():
        return np.empty(0, dtype=np.int64)
    offsets, shapes = boxes[:, 0], boxes[:, 1]
    meets = (offsets < begin + extent) & (begin < offsets + shapes) & (shapes > 0)
    return np.flatnonzero(meets.all(axis=1))
