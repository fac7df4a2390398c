import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from waystation import grid


@st.composite
def places(draw):
    """Files and offsets of chunks: stretches of constant strides, some of them single."""
    files, offsets = [], []
    for _ in range(draw(st.integers(1, 30))):
        file, offset = draw(st.integers(0, 50)), draw(st.integers(0, 50))
        strides = draw(st.tuples(st.integers(-2, 3), st.integers(-2, 3)))
        steps = np.arange(draw(st.integers(1, 9)))
        files.append(100 + file + steps * strides[0])
        offsets.append(100 + offset + steps * strides[1])
    return np.concatenate(files), np.concatenate(offsets)


@given(places())
def test_runs_say_where_every_chunk_is(example):
    files, offsets = example
    runs = grid.find_runs(files, offsets, len(files))
    found = grid.places_in_runs(runs, np.arange(len(files)))
    assert np.array_equal(found[0], files)
    assert np.array_equal(found[1], offsets)
    assert runs[0, 0] == 0
    assert (np.diff(runs[:, 0]) > 0).all()
    assert (runs >= 0).all()
    assert grid.find_runs(files, offsets, len(runs)) is not None
    assert grid.find_runs(files, offsets, len(runs) - 1) is None


@given(places(), st.integers(1, 20))
def test_chunks_are_found_in_a_part_of_the_runs(example, group):
    files, offsets = example
    runs = grid.find_runs(files, offsets, len(files))
    for begin in range(0, len(runs), group):
        own = runs[begin : begin + group]
        end = runs[begin + group, 0] if begin + group < len(runs) else len(files)
        numbers = np.arange(own[0, 0], end)
        found = grid.places_in_runs(own, numbers)
        assert np.array_equal(found[0], files[numbers])
        assert np.array_equal(found[1], offsets[numbers])


def test_a_chunk_of_every_process_at_the_same_place_of_its_file_is_one_run():
    files, offsets = np.arange(100_000), np.full(100_000, 4096)
    assert grid.find_runs(files, offsets, 1).tolist() == [[0, 0, 1, 4096, 0]]
    offsets[70_000:] += 4096  # headers grow with the digits of their offsets
    assert grid.find_runs(files, offsets, 9).tolist() == [[0, 0, 1, 4096, 0], [70_000, 70_000, 1, 8192, 0]]


def test_exceptions_cost_two_runs_each():
    offsets = np.full(1000, 4096)
    offsets[[17, 400, 999]] += 64
    assert len(grid.find_runs(np.arange(1000), offsets, 1000)) <= 7


def test_words_hold_the_first_chunk_of_every_group():
    runs = np.array([[2 * run, run, 1, 0, 0] for run in range(130)])
    words = grid.words_of_runs(runs)
    assert words.dtype == np.dtype("<u8")
    assert words[:4].tolist() == [130, 0, 128, 256]
    assert np.array_equal(words[4:].reshape(-1, grid.RUN_WORDS), runs)
