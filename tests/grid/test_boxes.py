import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation import errors, grid

extents = st.integers(0, 6)


@st.composite
def shapes(draw, *, most_axes=3, least=0, most=6):
    return tuple(draw(st.lists(st.integers(least, most), max_size=most_axes)))


@st.composite
def box_in(draw, shape):
    offset = tuple(draw(st.integers(0, extent)) for extent in shape)
    return offset, tuple(
        draw(st.integers(0, extent - begin)) for extent, begin in zip(shape, offset, strict=True)
    )


@st.composite
def shape_and_boxes(draw, count):
    shape = draw(shapes())
    return shape, [draw(box_in(shape)) for _ in range(count)]


def mask(shape, box):
    marked = np.zeros(shape, dtype=bool)
    if box is not None:
        marked[grid.slices_of_box(box)] = True
    return marked


@given(shape_and_boxes(2))
def test_an_intersection_holds_exactly_the_common_elements(example):
    shape, (first, second) = example
    common = grid.intersect(first, second)
    expected = mask(shape, first) & mask(shape, second)
    assert (mask(shape, common) == expected).all()
    assert (common is None) == (not expected.any())
    assert common is None or grid.volume(common) == expected.sum()


@given(shape_and_boxes(1))
def test_a_span_is_where_the_elements_of_a_box_lie_one_after_another(example):
    shape, (box,) = example
    places = np.flatnonzero(mask(shape, box))
    span = grid.contiguous_span(shape, box)
    if len(places) and places[-1] - places[0] + 1 == len(places):
        assert span == (places[0], len(places))
    elif len(places):
        assert span is None


@given(shape_and_boxes(2))
def test_containing_is_to_have_every_element(example):
    shape, (first, second) = example
    if grid.volume(second):
        assert grid.contains(first, second) == (not (mask(shape, second) & ~mask(shape, first)).any())


def test_an_empty_box_outside_is_not_contained():
    assert not grid.contains(((0,), (4,)), ((5,), (0,)))
    assert grid.contains(((0,), (4,)), ((4,), (0,)))


def test_the_box_without_axes_meets_itself():
    assert grid.intersect(((), ()), ((), ())) == ((), ())
    assert grid.volume(((), ())) == 1


@given(shape_and_boxes(1))
def test_slices_and_boxes_are_inverse(example):
    shape, (box,) = example
    assert grid.box_of_slices(grid.slices_of_box(box), shape) == box


def test_open_slices_are_whole_axes():
    box = grid.box_of_slices((slice(None), slice(2, None), slice(5, 1)), (3, 4, 6))
    assert box == ((0, 2, 5), (3, 2, 0))


@pytest.mark.parametrize(("slices", "shape"), [((slice(0, 4, 2),), (4,)), ((slice(None),), (4, 4))])
def test_slices_that_are_no_box_are_refused(slices, shape):
    with pytest.raises(errors.InvalidInput):
        grid.box_of_slices(slices, shape)


def test_a_box_counts_from_an_origin():
    assert grid.relative_to(((5, 7), (2, 2)), (4, 7)) == ((1, 0), (2, 2))


@given(shape_and_boxes(6))
def test_bulk_search_agrees_with_one_by_one(example):
    shape, (box, *others) = example
    boxes = grid.box_array(others, len(shape))
    positions = grid.positions_meeting(boxes, box)
    assert positions.tolist() == [i for i, other in enumerate(others) if grid.intersect(other, box)]


@pytest.mark.parametrize("boxes", [[((0,), (1, 2))], [((0, 0), (1, 2))], [((2**70,), (1,))]])
def test_boxes_that_do_not_fit_are_refused(boxes):
    with pytest.raises(errors.InvalidInput):
        grid.box_array(boxes, 1)


@given(shape_and_boxes(4))
def test_what_is_left_of_a_box_is_covered_once(example):
    shape, (box, *others) = example
    counts = np.zeros(shape, np.int64)
    for rest in grid.subtract(box, others):
        counts[grid.slices_of_box(rest)] += 1
    expected = mask(shape, box)
    for other in others:
        expected &= ~mask(shape, other)
    assert (counts == expected).all()
