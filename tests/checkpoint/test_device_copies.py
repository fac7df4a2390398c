"""Rows of copies from devices, carried out here on host memory."""

from __future__ import annotations

import ctypes
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from waystation.frameworks.base import Block
from waystation.layouts.native.blocks import copies


@st.composite
def boxes(draw: st.DrawFn) -> tuple[np.ndarray, tuple[slice, ...]]:
    """An array, its axes in any order, and a box of it."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    array = np.random.default_rng(0).integers(0, 1 << 15, shape).astype(np.int16)
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    begins = [draw(st.integers(0, extent)) for extent in array.shape]
    ends = [draw(st.integers(begin, extent)) for begin, extent in zip(begins, array.shape, strict=True)]
    return array, tuple(map(slice, begins, ends))


@given(boxes())
def test_rows_fill_a_block_in_order(drawn: tuple[np.ndarray, tuple[slice, ...]]) -> None:
    array, box = drawn
    view = array[box]
    address = view.__array_interface__["data"][0]
    block = Block((0,) * view.ndim, view.shape, view.strides, address, array, 0)
    place = np.zeros(view.shape, np.int16)
    begin = place.ctypes.data
    filled = begin
    for device, destination, source, row_bytes, rows, step in copies(block, 2, begin):
        assert (device, destination) == (0, filled)
        for row in range(rows):
            ctypes.memmove(filled, source + row * step, row_bytes)
            filled += row_bytes
    assert filled == begin + math.prod(view.shape) * 2
    assert np.array_equal(place, view)


def test_what_can_be_one_row_is_one() -> None:
    whole = Block((0, 0, 0), (4, 8, 16), (8 * 16 * 4, 16 * 4, 4), 4096, None, 0)
    assert copies(whole, 4, 0) == [(0, 0, 4096, 4 * 8 * 16 * 4, 1, 0)]
    columns = Block((0, 0, 0), (4, 8, 2), (8 * 16 * 4, 16 * 4, 4), 4096, None, 0)
    assert copies(columns, 4, 0) == [(0, 0, 4096, 8, 32, 64)]
    rows = Block((0, 0, 0), (4, 2, 2), (8 * 16 * 4, 16 * 4, 4), 4096, None, 0)
    assert len(copies(rows, 4, 0)) == 4
