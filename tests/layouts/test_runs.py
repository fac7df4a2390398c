"""Arrays whose chunks are in runs: what was written is read, and what the runs name is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layouts.plans import PATHS, Program, expand
from tests.support.long import amount

from waystation import grid
from waystation.errors import Corrupt
from waystation.layouts.native import places, tables
from waystation.layouts.opened import Request

PROCESSES = 96


def program(transposed: bool = False) -> Program:
    """Each of 96 processes writes a row of one array, a tile of another, and some of them a small array."""
    shapes = [(2 * PROCESSES, 5), (3 * 12, 4 * 8), (PROCESSES * 2 - 1,), *[(2048,)] * 3]
    written: list[list[tuple[int, grid.Box]]] = []
    for process in range(PROCESSES):
        row, column = (process % 12, process // 12) if transposed else divmod(process, 8)
        extent = 2 if process + 1 < PROCESSES else 1
        own: list[tuple[int, grid.Box]] = [
            (0, ((2 * process, 0), (2, 5))),
            (1, ((3 * row, 4 * column), (3, 4))),
            (2, ((2 * process,), (extent,))),
        ]
        if process % 32 == 5:
            own.insert(0, (3 + process // 32, ((0,), (2048,))))
        written.append(own)
    return Program(shapes, written)


@pytest.mark.parametrize("transposed", [False, True])
@settings(max_examples=amount(6, 300))
@given(data=st.data())
def test_what_was_written_is_read(transposed: bool, data: Any) -> None:
    whole = program(transposed)
    decoded = whole.merge()
    assert decoded.arrays["kind"].tolist()[:3] == [tables.RUNS] * 3
    assert [decoded.chunk_count(array) for array in range(4)] == [PROCESSES, PROCESSES, PROCESSES, 1]
    assert len(decoded.chunks) == 3
    requests = []
    for array in data.draw(st.lists(st.integers(0, 5), unique=True)):
        shape = whole.sources[array].shape
        begin = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
        room = [extent - at for at, extent in zip(begin, shape, strict=True)]
        requests.append(Request(array, [(begin, tuple(data.draw(st.integers(1, most)) for most in room))]))
    for request, found in zip(requests, whole.read(decoded, requests), strict=True):
        assert np.array_equal(found, whole.values[request.array][grid.slices_of_box(request.boxes[0])])


def test_expanded_runs_are_the_chunks_of_the_files() -> None:
    whole = program()
    decoded = whole.merge()
    for array in (0, 1, 2):
        chunks = grid.ChunkGrid(decoded.array_shape(array), decoded.chunk_shape(array))
        for number, entry in enumerate(expand(decoded, array)):
            begin = int(entry["offset"])
            data = whole.files[int(entry["file"])][begin : begin + int(entry["length"])]
            assert data == whole.values[array][grid.slices_of_box(chunks.box(number))].tobytes()


def test_bytes_of_one_file_with_a_whole_array() -> None:
    rows = [(0, ((2 * row, 0), (2 if row < 99 else 1, 8))) for row in range(100)]
    whole = Program([(199, 8), (2048,)], [[*rows, (1, ((0,), (2048,)))]])
    decoded = whole.merge()
    assert decoded.arrays["kind"].tolist() == [tables.RUNS, tables.REGULAR]
    (entry,) = decoded.files[:]
    rows_begin = int(entry["data_start"]) + 4096
    end = int(entry["file_bytes"])
    assert end - rows_begin == 199 * 16
    assert places.arrays_at(decoded, 0, 0, rows_begin) == [1]
    for begin, stop in [(rows_begin, rows_begin + 1), (rows_begin + 50, rows_begin + 51), (end - 1, end)]:
        assert places.arrays_at(decoded, 0, begin, stop) == [0]
    assert places.arrays_at(decoded, 0, end, end + 99) == []


def test_bytes_of_a_file_are_those_of_its_arrays() -> None:
    decoded = program().merge()
    entry = decoded.files[5]
    start = int(entry["data_start"])
    assert places.arrays_at(decoded, 5, start, int(entry["file_bytes"])) == [0, 1, 2, 3]
    assert places.arrays_at(decoded, 6, start, int(entry["file_bytes"])) == [0, 1, 2]
    assert places.arrays_at(decoded, 5, 0, start) == []
    assert places.arrays_at(decoded, 5, start, start + 1) == [3]


@pytest.mark.parametrize(("word", "value"), [(1, 95), (1, 1 << 31), (3, 1 << 40), (4, 64)])
def test_runs_that_lead_out_of_their_files_are_corrupt(word: int, value: int) -> None:
    whole = program()
    decoded = whole.merge()
    dims = decoded.dims[:].copy()
    run = int(decoded.arrays["first_dim"][0]) + 2 * 2 + 1 + 1
    dims[run + word] = value
    decoded.dims = dims
    encoded = decoded.encode_files(), decoded.encode_chunks(), decoded.encode_checksums()
    changed = tables.decode(*encoded, PATHS)
    with pytest.raises(Corrupt, match=r"lies outside of it|not among the 96 of the file table"):
        whole.read(changed, [Request(0, [grid.whole((2 * PROCESSES, 5))])])


def test_a_few_chunks_are_listed_one_by_one() -> None:
    shape = (63, 2)
    few = Program([shape], [[(0, ((row, 0), (1, 2)))] for row in range(63)])
    assert few.merge().arrays["kind"].tolist() == [tables.REGULAR]


def test_places_without_a_pattern_are_listed_one_by_one() -> None:
    order = np.random.default_rng(0).permutation(100).tolist()
    scattered = Program([(100, 2)], [[(0, ((row, 0), (1, 2)))] for row in order])
    decoded = scattered.merge()
    assert decoded.arrays["kind"].tolist() == [tables.REGULAR]
    (found,) = scattered.read(decoded, [Request(0, [grid.whole((100, 2))])])
    assert np.array_equal(found, scattered.values[0])
