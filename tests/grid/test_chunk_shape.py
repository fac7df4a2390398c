import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import errors, grid


@pytest.mark.parametrize(
    ("shard_shape", "chunk_axes", "sharded_axes", "chunk_shape"),
    [
        ((8,), None, (0,), (4,)),  # (128,) over 16 devices
        ((4, 16), None, (0, 1), (2, 2)),  # (32, 32) over 8 x 2 devices
        ((4, 16), (1,), (0, 1), (4, 1)),
        ((2, 64), None, (0,), (1, 4)),  # (32, 64) over 16 devices along axis 0
    ],
)
def test_the_examples_of_orbax_at_sixteen_bytes_of_float32(
    shard_shape, chunk_axes, sharded_axes, chunk_shape
):
    assert grid.choose_chunk_shape(shard_shape, 4, 16, chunk_axes, sharded_axes) == chunk_shape


shard_shapes = st.lists(st.integers(0, 64), max_size=4).map(tuple)


@st.composite
def requests(draw):
    shape = draw(shard_shapes)
    axes = st.lists(st.sampled_from(range(len(shape))), unique=True) if shape else st.just([])
    return shape, draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(8, 4096)), draw(axes)


@given(requests())
def test_chunks_divide_the_shard_and_are_small_enough(request):
    shape, item_bytes, chunk_bytes, sharded = request
    chunk = grid.choose_chunk_shape(shape, item_bytes, chunk_bytes, None, sharded)
    assert all(extent % step == 0 for extent, step in zip(shape, chunk, strict=True))
    assert math.prod(chunk) * item_bytes <= chunk_bytes


@given(requests())
def test_no_axis_could_be_divided_less(request):
    shape, item_bytes, chunk_bytes, sharded = request
    chunk = grid.choose_chunk_shape(shape, item_bytes, chunk_bytes, None, sharded)
    for axis, step in enumerate(chunk):
        for larger in range(step + 1, shape[axis] + 1):
            if shape[axis] % larger == 0:
                assert math.prod(chunk) // step * larger * item_bytes > chunk_bytes


@given(requests())
def test_only_the_given_axes_are_split(request):
    shape, item_bytes, chunk_bytes, axes = request
    if not axes:
        return
    chunk = grid.choose_chunk_shape(shape, item_bytes, chunk_bytes, axes)
    assert all(chunk[axis] == max(1, shape[axis]) for axis in range(len(shape)) if axis not in axes)
    too_large = math.prod(chunk) * item_bytes > chunk_bytes
    assert not too_large or all(chunk[axis] == 1 for axis in axes)


@given(requests())
def test_chunks_are_never_smaller_than_those_of_orbax(request):
    subchunking = pytest.importorskip("orbax.checkpoint._src.arrays.subchunking")
    shape, item_bytes, chunk_bytes, sharded = request
    shape = tuple(max(1, extent) for extent in shape)
    array_shape = tuple(extent * (2 if axis in sharded else 1) for axis, extent in enumerate(shape))
    theirs = subchunking.choose_chunk_shape(array_shape, shape, np.dtype(f"V{item_bytes}"), chunk_bytes)
    ours = grid.choose_chunk_shape(shape, item_bytes, chunk_bytes, None, sharded)
    assert math.prod(ours) >= math.prod(theirs)


def test_a_small_shard_is_left_whole():
    assert grid.choose_chunk_shape((3, 5), 4, 1 << 20) == (3, 5)
    assert grid.choose_chunk_shape((), 4, 1) == ()
    assert grid.choose_chunk_shape((0, 5), 4, 8) == (1, 1)


def test_axes_count_from_the_end_too():
    assert grid.choose_chunk_shape((4, 16), 4, 16, (-1,)) == (4, 1)


@pytest.mark.parametrize(
    "arguments",
    [((4,), 4, 0), ((4,), 0, 4), ((4,), 4, 4, (1,)), ((4,), 4, 4, (-2,)), ((4,), 4, 4, None, (3,))],
)
def test_impossible_requests_are_refused(arguments):
    with pytest.raises(errors.InvalidInput):
        grid.choose_chunk_shape(*arguments)
