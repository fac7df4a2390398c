"""The arithmetic of DTensors against torch's own, for every process of a mesh at once; no process is run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from waystation.frameworks.torch_distributed import _split
from waystation.frameworks.torch_shards import Split, local_shard, spread_of
from waystation.grid import find_cover_defect, slices_of_box, volume

torch = pytest.importorskip("torch")
placement_types = pytest.importorskip("torch.distributed.tensor.placement_types")
Shard, StridedShard, Replicate = (
    placement_types.Shard,
    placement_types._StridedShard,
    placement_types.Replicate,
)


@st.composite
def divided(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """The shape of an array, the shape of a mesh, and placements."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds: list[Any] = [st.builds(Replicate)]
    if shape:
        axes = st.integers(0, len(shape) - 1)
        kinds.append(st.builds(Shard, axes))
        kinds.append(st.builds(lambda axis, n: StridedShard(axis, split_factor=n), axes, st.integers(1, 5)))
    return shape, mesh, [draw(st.one_of(kinds)) for _ in mesh]


def local_by_torch(full: Any, mesh: tuple[int, ...], placements: list[Any], at: tuple[int, ...]) -> Any:
    """What torch itself would scatter to the process at `at`."""
    for size, placement, index in zip(mesh, placements, at, strict=True):
        if not isinstance(placement, Replicate):
            full = placement._split_tensor(full, size, with_padding=False)[0][index]
    return full


@given(divided())
@example(((9,), (4,), [StridedShard(0, split_factor=2)]))
@example(((12, 5), (3, 2), [StridedShard(0, split_factor=2), Shard(0)]))
@example(((7,), (3, 2), [StridedShard(0, split_factor=2), Shard(0)]))
def test_every_process_holds_what_torch_gives_it(case: Any) -> None:
    shape, mesh, placements = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    splits = [_split(placement, len(shape)) for placement in placements]
    for at in np.ndindex(mesh):
        expected = local_by_torch(full, mesh, placements, at)
        shard = local_shard(shape, mesh, splits, at)
        assert shard.shape == tuple(expected.shape)
        assert all(map(volume, shard.boxes))
        local = torch.full(shard.shape, -1)
        for box, place in zip(shard.boxes, shard.places, strict=True):
            local[slices_of_box((place, box[1]))] = full[slices_of_box(box)]
        assert torch.equal(local, expected)


@given(divided())
def test_shapes_and_offsets_agree_with_torch(case: Any) -> None:
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    shape, mesh, placements = case
    splits = [_split(placement, len(shape)) for placement in placements]
    for at in np.ndindex(mesh):
        local, offset = utils._compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
        shard = local_shard(shape, mesh, splits, at)
        assert shard.shape == tuple(local)
        assert [box[0] for box in shard.boxes][:1] == ([tuple(offset)] if shard.boxes else [])


@given(divided(), st.randoms(use_true_random=False))
def test_a_spread_is_what_all_processes_hold(case: Any, random: Any) -> None:
    shape, mesh, placements = case
    splits = [_split(placement, len(shape)) for placement in placements]
    numbers = random.sample(range(100), math.prod(mesh))
    ranks = np.array(numbers).reshape(mesh)
    spread = spread_of(shape, ranks, splits)
    assert spread.array_shape == shape
    assert find_cover_defect(shape, spread.boxes) is None
    assert all(list(group) == sorted(set(group)) for group in spread.holders)
    if not math.prod(shape):
        assert spread.holders == (tuple(sorted(numbers)),)
        return
    for at in np.ndindex(mesh):
        held = zip(spread.boxes, spread.holders, strict=True)
        own = tuple(box for box, group in held if ranks[at] in group)
        assert own == local_shard(shape, mesh, splits, at).boxes


def test_pieces_that_touch_are_one_box() -> None:
    assert local_shard((8,), (1,), [Split(0, 4)], (0,)).boxes == (((0,), (8,)),)
    together = [Split(0, 2), Split(0)]  # as FSDP2 and tensor parallelism divide a matrix
    assert local_shard((8,), (2, 2), together, (0, 1)).boxes == (((4,), (2,)),)


def test_axes_counted_from_the_last_and_axes_that_are_not_there() -> None:
    assert _split(Shard(-1), 3) == Split(2)
    assert _split(StridedShard(-3, split_factor=2), 3) == Split(0, 2)
    with pytest.raises(ValueError, match="3 axes cannot have"):
        _split(Shard(3), 3)
