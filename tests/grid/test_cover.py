from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import grid
from waystation.grid import _cover


@contextmanager
def always_halving():
    """Small examples are settled by counting cells; with no cells allowed they are halved first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cover, "_FREE_CELLS", 1)
        patch.setattr(_cover, "_CELLS_PER_BOX", 0)
        yield


def count(shape, boxes):
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[grid.slices_of_box(box)] += 1
    return counts


@st.composite
def partitions(draw, shape):
    """A random partition: boxes halved again and again."""
    boxes = [grid.whole(shape)]
    for _ in range(draw(st.integers(0, 12))):
        place = draw(st.integers(0, len(boxes) - 1))
        offset, extents = boxes[place]
        axes = [axis for axis, extent in enumerate(extents) if extent > 1]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        cut = draw(st.integers(1, extents[axis] - 1))
        boxes[place] = offset, (*extents[:axis], cut, *extents[axis + 1 :])
        boxes.append(
            (
                (*offset[:axis], offset[axis] + cut, *offset[axis + 1 :]),
                (*extents[:axis], extents[axis] - cut, *extents[axis + 1 :]),
            )
        )
    return draw(st.permutations(boxes))


@st.composite
def coverings(draw):
    """Partitions, most of them damaged."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    boxes = draw(partitions(shape))
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(["drop", "add", "empty"]))
        offset = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
        extents = tuple(draw(st.integers(1, e - o)) for e, o in zip(shape, offset, strict=True))
        if change == "drop" and boxes:
            boxes.pop()
        elif change == "add":
            boxes.append((offset, extents))
        elif shape:
            boxes.append((offset, (0, *extents[1:])))
    return shape, boxes


def check(shape, boxes):
    counts = count(shape, boxes)
    defect = grid.find_cover_defect(shape, boxes)
    assert (defect is None) == bool((counts == 1).all())
    if defect is not None:
        there = counts[grid.slices_of_box(defect.box)]
        assert there.size
        assert (there == 0).all() if defect.kind == "hole" else (there > 1).all()
        assert list(defect.positions) == [
            i for i, box in enumerate(boxes) if grid.intersect(box, defect.box) is not None
        ]
    overlap = grid.find_cover_defect(shape, boxes, holes_allowed=True)
    assert (overlap is None) == bool((counts <= 1).all())
    if overlap is not None:
        assert overlap.kind == "overlap"
        assert (counts[grid.slices_of_box(overlap.box)] > 1).all()


@given(coverings())
def test_defects_are_those_that_counting_finds(example):
    check(*example)


@given(coverings())
def test_defects_are_found_by_halving_too(example):
    with always_halving():
        check(*example)


def test_a_pinwheel_that_no_straight_cut_divides():
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    with always_halving():
        check((3, 3), boxes)
        check((3, 3), boxes[:-1])


@pytest.mark.parametrize(
    "box", [((3,), (2,)), ((-1,), (2,)), ((0,), (-1,)), ((5,), (0,)), ((2**63 - 1,), (2**63 - 1,))]
)
def test_boxes_outside_are_named(box):
    defect = grid.find_cover_defect((4,), [((0,), (4,)), box])
    assert defect == grid.CoverDefect("outside", box, (1,))


def test_arrays_without_axes_and_without_elements():
    assert grid.find_cover_defect((), [((), ())]) is None
    assert grid.find_cover_defect((), []).kind == "hole"
    assert grid.find_cover_defect((), [((), ()), ((), ())]).kind == "overlap"
    assert grid.find_cover_defect((0, 3), []) is None
    assert grid.find_cover_defect((0, 3), [((0, 0), (0, 3))]) is None


def test_one_hole_among_many_boxes_of_a_staircase():
    # Boxes whose boundaries differ everywhere: the cells are as many as the square of the boxes.
    boxes = []
    for row in range(300):
        boxes += [((row, 0), (1, row + 1)), ((row, row + 1), (1, 1000 - row))]
    assert grid.find_cover_defect((300, 1001), boxes) is None
    missing = boxes.pop(401)
    defect = grid.find_cover_defect((300, 1001), boxes)
    assert defect.kind == "hole"
    assert grid.contains(missing, defect.box)


def test_a_hypercube_of_many_axes():
    chunks = grid.ChunkGrid((2,) * 14, (1,) * 14)
    assert grid.find_cover_defect(chunks.array_shape, chunks.boxes()) is None
