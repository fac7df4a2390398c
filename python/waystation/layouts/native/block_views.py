"""Blocks of host memory as NumPy sees them."""

from __future__ import annotations

from typing import Any

import numpy as np

from waystation.frameworks.base import Block


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
