import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from waystation import grid

boxes_2d = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 30), st.integers(0, 30)), st.tuples(st.integers(0, 9), st.integers(0, 9))
    ),
    max_size=300,
)
box_2d = st.tuples(
    st.tuples(st.integers(-5, 35), st.integers(-5, 35)), st.tuples(st.integers(0, 40), st.integers(0, 40))
)


def meeting(*arguments):
    """The numbers and boxes that are found, one by one."""
    numbers, boxes = grid.irregular_chunks_meeting(*arguments)
    assert len(numbers) == len(boxes)
    return [(number, grid.box_at(boxes, place)) for place, number in enumerate(numbers.tolist())]


@given(boxes_2d, box_2d, st.integers(0, 5))
def test_search_through_groups_agrees_with_a_scan(boxes, box, begin):
    found, order = grid.IrregularBoxes.sort(boxes, 2)
    words = np.concatenate([np.zeros(begin, np.uint64), found.to_words()])
    chunks = meeting(words, len(boxes), box, begin)
    assert [number for number, _ in chunks] == sorted(number for number, _ in chunks)
    assert {int(order[number]): chunk for number, chunk in chunks} == {
        place: other for place, other in enumerate(boxes) if grid.intersect(other, box)
    }


class Watched:
    """Words that remember which of them were looked at."""

    def __init__(self, words):
        self.words, self.seen = words, set()

    def __getitem__(self, key):
        self.seen |= set(np.arange(len(self.words))[key].tolist())
        return self.words[key]


def test_only_groups_that_meet_the_box_are_looked_at():
    boxes = [((place,), (1,)) for place in range(6400)]
    found, _ = grid.IrregularBoxes.sort(boxes, 1)
    words = Watched(found.to_words())
    assert meeting(words, 6400, ((130,), (2,))) == [
        (130, ((130,), (1,))),
        (131, ((131,), (1,))),
    ]
    assert len(words.seen) == 2 * (100 + 64)


@given(boxes_2d)
def test_boxes_are_sorted_by_offset_and_survive_as_words(boxes):
    found, order = grid.IrregularBoxes.sort(boxes, 2)
    offsets = [tuple(offset) for offset in found.boxes[:, 0].tolist()]
    assert offsets == sorted(offsets)
    assert sorted(order.tolist()) == list(range(len(boxes)))
    words = found.to_words()
    assert words.dtype == np.dtype("<u8")
    assert (words == [*found.groups.ravel(), *found.boxes.ravel()]).all()


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
    assert meeting(found.to_words(), 1, ((), ())) == [(0, ((), ()))]
