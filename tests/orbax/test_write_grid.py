"""How arrays are cut for Orbax's layouts: the processes write a partition, each from what it holds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import errors, grid
from waystation._options import ArraySavingOptions, StorageOptions
from waystation.frameworks.base import ArraySource
from waystation.grid import Spread
from waystation.layouts.native.chunks import Writer
from waystation.layouts.orbax import write_plan
from waystation.layouts.orbax.frame_limits import FrameLimits
from waystation.layouts.orbax.write_grid import Cut, Cutter


def source_of(spread: Spread) -> ArraySource:
    """An array of four-byte elements of which the memory does not matter."""
    shape = spread.array_shape
    return ArraySource(
        shape, "float32", "jax", "F32", shape, storage_item_bytes=4, blocks=[], spread=spread, mutable=False
    )


def cutters(count: int, min_slice_bytes: int, chunk_bytes: int = 1 << 20) -> list[Cutter]:
    """One for each process of a program."""
    return [Cutter(Writer(process, count), min_slice_bytes, count, chunk_bytes) for process in range(count)]


@st.composite
def spreads(draw: st.DrawFn, count: int) -> Spread:
    """Arrays cut anywhere along their axes, each box held by some processes."""
    boxes: list[list[tuple[int, int]]] = []
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        extents = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        if draw(st.booleans()):
            extents = [extents[0]] * len(extents)
        shape.append(sum(extents))
        begins = itertools.accumulate(extents, initial=0)
        boxes.append(list(zip(begins, extents, strict=False)))
    made = tuple(
        (tuple(begin for begin, _ in parts), tuple(extent for _, extent in parts))
        for parts in itertools.product(*boxes)
    )
    holders = st.sets(st.integers(0, count - 1), min_size=1)
    return Spread(tuple(shape), made, tuple(tuple(sorted(draw(holders))) for _ in made))


@given(st.data())
def test_processes_write_a_partition_of_what_they_hold(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 5))
    made = data.draw(st.lists(spreads(count), min_size=1, max_size=4))
    every = cutters(count, data.draw(st.sampled_from([1, 16, 1 << 20])))
    storage = StorageOptions(chunk_bytes=data.draw(st.sampled_from([None, 4, 40])))
    for spread in made:
        cuts = [cutter.cut(source_of(spread), 4, storage) for cutter in every]
        assert len({found.grid for found in cuts}) == 1, "every process has the same grid"
        numbers = sorted(itertools.chain.from_iterable(found.own for found in cuts))
        assert numbers == list(range(cuts[0].grid.chunk_count))
        for process, found in enumerate(cuts):
            assert all(_is_held(found, number, spread, process) for number in found.own)


def _is_held(found: Cut, number: int, spread: Spread, process: int) -> bool:
    box = found.grid.box(number)
    return any(
        process in holders and grid.contains(held, box)
        for held, holders in zip(spread.boxes, spread.holders, strict=True)
    )


@given(st.data())
def test_no_file_is_written_by_two_processes(data: st.DataObject) -> None:
    """On a network file system two that write into one page would undo what the other wrote."""
    count = data.draw(st.integers(2, 4))
    made = {f"array{number}": source_of(data.draw(spreads(count))) for number in range(3)}
    saving = ArraySavingOptions(
        use_ocdbt=data.draw(st.booleans()),
        use_zarr3=data.draw(st.booleans()),
        use_compression=False,
        min_slice_bytes_for_replica_parallel=4,
        storage_options=StorageOptions(chunk_bytes=data.draw(st.sampled_from([None, 4, 40]))),
    )
    writers: dict[str, int] = {}
    sizes = 0
    for process in range(count):
        writer = Writer(process, count)
        arrays = write_plan.cut(list(made), list(made.values()), saving, writer, {}, FrameLimits())
        arrays.describe()
        planned = write_plan.plan(arrays, process)
        sizes += sum(value.chunk.nbytes for value in arrays.values)
        for file in planned.files:
            assert writers.setdefault(file.name, process) == process
    assert sizes >= sum(4 * math.prod(source.shape) for source in made.values())


def test_holders_share_what_they_all_have() -> None:
    spread = Spread((64, 8), (((0, 0), (64, 8)),), ((0, 1, 2, 3),))
    cuts = [cutter.cut(source_of(spread), 4, StorageOptions()) for cutter in cutters(4, 1)]
    assert [found.own for found in cuts] == [[0], [1], [2], [3]]
    assert cuts[0].grid.chunk_shape == (16, 8)


def test_small_arrays_go_to_who_has_been_given_least() -> None:
    every = cutters(3, 1 << 20)
    written = [0, 0, 0]
    for extent in (100, 10, 20, 30, 40, 50):
        spread = Spread((extent,), (((0,), (extent,)),), ((0, 1, 2),))
        for process, cutter in enumerate(every):
            written[process] += extent * len(cutter.cut(source_of(spread), 4, StorageOptions()).own)
    assert written == [100, 90, 60]


def test_large_chunks_are_divided_along_the_first_axes() -> None:
    shape = (4, 6, 1000)
    cutter = Cutter(Writer(), 1, 1, 1 << 12)
    found = cutter.cut(source_of(Spread(shape, (), ())), 4, StorageOptions())
    assert found.grid.chunk_shape == (1, 1, 1000)
    assert found.is_alone


def test_shards_without_a_grid_are_refused() -> None:
    begins = [0, 1 << 20, (1 << 21) + 1]
    boxes = tuple(((begin,), (end - begin,)) for begin, end in itertools.pairwise([*begins, 1 << 22]))
    spread = Spread((1 << 22,), boxes, ((0,), (1,), (0,)))
    with pytest.raises(errors.Unsupported, match="equal chunks only"):
        cutters(2, 1)[0].cut(source_of(spread), 4, StorageOptions())


def test_an_array_without_elements_has_no_chunks() -> None:
    spread = Spread((0, 5), (), ())
    found = cutters(2, 1)[0].cut(source_of(spread), 4, StorageOptions())
    assert found.own == []
    assert math.prod(found.grid.chunk_shape) > 0
