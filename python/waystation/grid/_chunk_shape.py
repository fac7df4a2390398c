"""The shape of chunks: how a shard is divided so that no chunk is larger than asked.

Invariants: the chunk shape divides the shard shape exactly; only axes that may be split are; the choice
depends on shapes alone, so that every process makes the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from waystation._errors import InvalidInput
from waystation.grid._boxes import Shape


def choose_chunk_shape(
    shard_shape: Sequence[int],
    item_bytes: int,
    chunk_bytes: int,
    chunk_axes: Sequence[int] | None = None,
    sharded_axes: Sequence[int] = (),
) -> Shape:
    """Divides a shard into equal chunks of at most `chunk_bytes`, as large as divisors allow.

    The longest axis is divided further and further until the chunk is small enough. A zero extent counts
    as one, so that the chunk shape is always a valid one.

    Args:
        shard_shape: What is divided.
        item_bytes: Of one element.
        chunk_bytes: The most bytes in a chunk. Chunks of one element, and axes that may not be split, can
            exceed it.
        chunk_axes: Split these axes only (negative ones count from the last). Without them, those in
            `sharded_axes` first and then any.
        sharded_axes: The axes along which the array is sharded already.

    Raises:
        InvalidInput: A size is not positive, or there is no such axis.
    """
    if item_bytes < 1 or chunk_bytes < 1:
        raise InvalidInput(f"chunk_bytes is {chunk_bytes}, of items of {item_bytes} bytes; give at least 1")
    ndim = len(shard_shape)
    choices = [_divisors(max(1, extent)) for extent in shard_shape]
    shape = [divisors[-1] for divisors in choices]
    largest = max(1, chunk_bytes // item_bytes)
    if chunk_axes:
        stages = [_axes(chunk_axes, ndim)]
    else:
        stages = [_axes(sharded_axes, ndim), set(range(ndim))]
    for axes in stages:
        _divide(shape, choices, axes, largest)
    return _grow(shape, choices, largest)


def _axes(axes: Iterable[int], ndim: int) -> set[int]:
    chosen = set()
    for axis in axes:
        if not -ndim <= axis < ndim:
            raise InvalidInput(
                f"there is no axis {axis} in an array of {ndim} axes; give arrays of other ranks their own "
                "chunk_axes with storage_options_for"
            )
        chosen.add(axis % ndim)
    return chosen


def _divide(shape: list[int], choices: list[Shape], axes: set[int], largest: int) -> None:
    while math.prod(shape) > largest:
        axis = max(sorted(axes), key=shape.__getitem__, default=None)
        if axis is None or shape[axis] == 1:
            return
        shape[axis] = choices[axis][choices[axis].index(shape[axis]) - 1]


def _grow(shape: list[int], choices: list[Shape], largest: int) -> Shape:
    """Takes back what dividing overshot, along the last axes first: their elements are contiguous."""
    for axis in reversed(range(len(shape))):
        allowed = largest * shape[axis] // math.prod(shape)
        shape[axis] = max(shape[axis], *(extent for extent in choices[axis] if extent <= allowed), 1)
    return tuple(shape)


@lru_cache(maxsize=1024)
def _divisors(extent: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, math.isqrt(extent) + 1) if extent % divisor == 0]
    return tuple(sorted({*small, *(extent // divisor for divisor in small)}))
