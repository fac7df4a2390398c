import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import errors, grid

boxes_2d = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 30), st.integers(0, 30)), st.tuples(st.integers(0, 9), st.integers(0, 9))
    ),
    max_size=300,
)
box_2d = st.tuples(
    st.tuples(st.integers(-5, 35), st.integers(-5, 35)), st.tuples(st.integers(0, 40), st.integers(0, 40))
)


@given(boxes_2d, box_2d)
def test_search_through_groups_agrees_with_a_scan(boxes, box):
    found, order = grid.IrregularBoxes.sort(boxes, 2)
    positions, shared = found.overlaps(box)
    scan = {place: grid.intersect(boxes[place], box) for place in range(len(boxes))}
    expected = {place: common for place, common in scan.items() if common}
    assert {int(order[p]): grid.box_at(shared, i) for i, p in enumerate(positions)} == expected
    assert positions.tolist() == sorted(positions.tolist())
    chunks = grid.irregular_chunks_meeting(found.to_words(), len(boxes), box)
    assert [(number, boxes[order[number]]) for number, _ in chunks] == [
        (number, boxes[order[number]]) for number in positions.tolist()
    ]
    assert all(boxes[order[number]] == chunk for number, chunk in chunks)


@given(boxes_2d)
def test_boxes_are_sorted_by_offset_and_survive_as_words(boxes):
    found, order = grid.IrregularBoxes.sort(boxes, 2)
    offsets = [tuple(offset) for offset in found.boxes[:, 0].tolist()]
    assert offsets == sorted(offsets)
    assert sorted(order.tolist()) == list(range(len(boxes)))
    words = found.to_words()
    assert words.dtype == np.dtype("<u8")
    again = grid.IrregularBoxes.from_words(words, 2, len(boxes))
    assert (again.boxes == found.boxes).all()
    assert (again.groups == found.groups).all()


def test_groups_bound_sixty_four_boxes_each():
    boxes = [((i,), (2,)) for i in range(130)]
    found, _ = grid.IrregularBoxes.sort(boxes, 1)
    assert [grid.box_at(found.groups, g) for g in range(3)] == [
        ((0,), (65,)),
        ((64,), (65,)),
        ((128,), (3,)),
    ]


def test_no_axes():
    found, _ = grid.IrregularBoxes.sort([((), ())], 0)
    positions, shared = found.overlaps(((), ()))
    assert positions.tolist() == [0]
    assert shared.shape == (1, 2, 0)


def test_words_of_another_length_are_refused():
    with pytest.raises(errors.InvalidInput, match="cannot be 3 boxes"):
        grid.IrregularBoxes.from_words(np.zeros(7, np.uint64), 1, 3)
