"""Blocks of memory: those of devices on their way to the host, those of the host as NumPy sees them.

The device's copy engine takes rows at a constant step. A block whose rows have no such step is described by
several copies; what lies one after another is one row. Invariants: on the host a block becomes contiguous,
in C order; the copies of a block fill it in that order.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from waystation import _native, _plans, grid
from waystation.frameworks.base import Block


def copies(block: Block, item_bytes: int, destination: int) -> list[tuple[int, ...]]:
    """Rows of `ARRAY_COPY` for a block that is to begin at `destination`."""
    pairs = zip(block.shape, block.strides, strict=True)
    axes = [(extent, stride) for extent, stride in pairs if extent != 1]
    if any(extent == 0 for extent, _ in axes):
        return []
    row_bytes, rows, step = item_bytes, 1, 0
    while axes and axes[-1][1] == row_bytes:
        row_bytes *= axes.pop()[0]
    if axes:
        rows, step = axes.pop()
    while axes and axes[-1][1] == rows * step:
        rows *= axes.pop()[0]
    found: list[tuple[int, ...]] = []
    for index in itertools.product(*(range(extent) for extent, _ in axes)):
        source = block.address + sum(at * stride for at, (_, stride) in zip(index, axes, strict=True))
        found.append((block.device, destination, source, row_bytes, rows, step))
        destination += row_bytes * rows
    return found


def copied_to_host(block: Block, item_bytes: int) -> Block:
    """A block of device memory as one of host memory."""
    slab = _native.allocate(math.prod(block.shape) * item_bytes)
    words = _plans.of_rows(_plans.ARRAY_COPY, copies(block, item_bytes, slab.address))
    _native.copy_from_devices(words, [slab], [block.owner])
    strides = grid.contiguous_strides(block.shape, item_bytes)
    return Block(block.offset, block.shape, strides, slab.address, slab)


class _Memory:
    """Foreign memory in the shape of a block."""

    def __init__(self, block: Block, axes: int, typestr: str) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": block.shape[:axes],
            "strides": block.strides[:axes],
            "typestr": typestr,
            "data": (block.address, True),
        }


def view_of(block: Block, axes: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The elements of a block of host memory, read-only; valid as long as the block's owner is kept.

    Args:
        block: The block.
        axes: How many of its axes count elements; those that follow are the bytes of one.
        dtype: Of the elements.
    """
    # The interface knows no dtypes but NumPy's own; others are seen as so many bytes first.
    raw = np.asarray(_Memory(block, axes, f"|V{dtype.itemsize}"))
    return raw.view(dtype)
