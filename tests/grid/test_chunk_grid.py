import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import errors, grid


@st.composite
def grids(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    return grid.ChunkGrid(shape, tuple(draw(st.integers(1, 8)) for _ in shape))


@st.composite
def grids_and_boxes(draw):
    chunks = draw(grids())
    offset = tuple(draw(st.integers(-2, 8)) for _ in chunks.array_shape)
    return chunks, (offset, tuple(draw(st.integers(0, 8)) for _ in offset))


@given(grids())
def test_the_chunks_number_every_element_once_in_row_major_order(chunks):
    numbers = np.full(chunks.array_shape, -1)
    for index in range(chunks.chunk_count):
        place = grid.slices_of_box(chunks.box(index))
        assert numbers[place].size
        assert (numbers[place] == -1).all()
        numbers[place] = index
    assert (numbers >= 0).all()
    first_seen = list(dict.fromkeys(tuple(chunks.box(i)[0]) for i in range(chunks.chunk_count)))
    assert first_seen == sorted(first_seen)


@given(grids())
def test_all_boxes_at_once_are_the_boxes_one_by_one(chunks):
    boxes = chunks.boxes()
    assert [grid.box_at(boxes, i) for i in range(len(boxes))] == [
        chunks.box(i) for i in range(chunks.chunk_count)
    ]


@given(grids_and_boxes())
def test_the_chunks_that_meet_a_box_are_those_of_a_full_scan(example):
    chunks, box = example
    scan = [(i, chunks.box(i)) for i in range(chunks.chunk_count) if grid.intersect(chunks.box(i), box)]
    assert chunks.meeting(box) == scan
    assert chunks.count_meeting(box) == len(scan)
    numbers, boxes = chunks.meeting_in_bulk(box)
    assert [(i, grid.box_at(boxes, place)) for place, i in enumerate(numbers.tolist())] == scan
    assert chunks.overlaps(box) == [(i, grid.intersect(chunk, box)) for i, chunk in scan]


@given(grids())
def test_the_volumes_of_chunks_are_those_of_their_boxes(chunks):
    numbers = np.arange(chunks.chunk_count)
    assert chunks.volumes(numbers).tolist() == [grid.volume(chunks.box(number)) for number in numbers]


def test_a_grid_far_too_large_to_scan_is_searched_by_arithmetic():
    chunks = grid.ChunkGrid((10**12, 10**12), (10, 10))
    index = 5 * 10**10 * 10**11 + 3
    assert chunks.box(index) == ((5 * 10**11, 30), (10, 10))
    assert chunks.overlaps(((5 * 10**11 + 9, 31), (2, 1))) == [
        (index, ((5 * 10**11 + 9, 31), (1, 1))),
        (index + 10**11, ((5 * 10**11 + 10, 31), (1, 1))),
    ]


def test_edges_are_clipped():
    chunks = grid.ChunkGrid((5, 3), (2, 2))
    assert chunks.counts == (3, 2)
    assert chunks.box(5) == ((4, 2), (1, 1))


def test_no_axes_is_one_chunk_and_a_zero_extent_none():
    assert grid.ChunkGrid((), ()).overlaps(((), ())) == [(0, ((), ()))]
    assert grid.ChunkGrid((4, 0), (2, 1)).chunk_count == 0


@pytest.mark.parametrize(("array", "chunk"), [((4,), (0,)), ((4,), (2, 2)), ((-1,), (1,))])
def test_impossible_grids_are_refused(array, chunk):
    with pytest.raises(errors.InvalidInput):
        grid.ChunkGrid(array, chunk)


@pytest.mark.parametrize("index", [-1, 6])
def test_chunks_beyond_the_grid_are_refused(index):
    with pytest.raises(errors.InvalidInput):
        grid.ChunkGrid((5, 3), (2, 2)).box(index)


@given(grids(), st.randoms(use_true_random=False))
def test_the_boxes_of_a_grid_are_recognised_in_any_order(chunks, random):
    boxes = [chunks.box(i) for i in range(chunks.chunk_count)]
    random.shuffle(boxes)
    found = grid.find_grid(chunks.array_shape, boxes)
    assert found is not None
    again, order = found
    assert [boxes[place] for place in order] == [again.box(i) for i in range(again.chunk_count)]


@given(grids(), st.data())
def test_boxes_that_are_no_grid_are_not_taken_for_one(chunks, data):
    boxes = [chunks.box(i) for i in range(chunks.chunk_count)]
    if not boxes:
        return
    place = data.draw(st.integers(0, len(boxes) - 1))
    change = data.draw(st.sampled_from(["drop", "repeat", "move", "widen"]))
    offset, shape = boxes[place]
    if change == "drop":
        del boxes[place]
    elif change == "repeat":
        boxes.append(boxes[place])
    elif change == "move" and offset:
        boxes[place] = ((offset[0] + 1, *offset[1:]), shape)
    elif change == "widen" and offset:
        boxes[place] = (offset, (shape[0] + 1, *shape[1:]))
    else:
        return
    assert grid.find_grid(chunks.array_shape, boxes) is None


def test_uneven_boxes_are_no_grid():
    assert grid.find_grid((4,), [((0,), (1,)), ((1,), (3,))]) is None
    assert grid.find_grid((4,), [((0,), (-1,)), ((1,), (3,))]) is None
