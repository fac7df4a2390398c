"""Tables of one host's part of a checkpoint: what is there is read, what is not is named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layouts.plans import Program, partitions

from waystation import grid
from waystation.errors import InvalidInput
from waystation.layouts.native import tables
from waystation.layouts.opened import Request


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[grid.Box]:
    sides = [st.integers(0, extent - 1) for extent in shape]
    corners = st.tuples(st.tuples(*sides), st.tuples(*sides))
    return corners.map(_box_between)


def _box_between(ends: tuple[tuple[int, ...], tuple[int, ...]]) -> grid.Box:
    spans = [sorted(along) for along in zip(*ends, strict=True)]
    return tuple(low for low, _ in spans), tuple(high - low + 1 for low, high in spans)


@given(data=st.data())
def test_a_part_gives_back_what_it_has_and_names_what_it_lacks(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    boxes = data.draw(partitions(shape))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(boxes), max_size=len(boxes)))
    written = [
        [(0, box) for box, owner in zip(boxes, owners, strict=True) if owner == process] for process in (0, 1)
    ]
    program = Program([shape], written, file_bytes_target=data.draw(st.sampled_from([64, 1 << 20])))
    there = np.zeros(shape, bool)
    for box, owner in zip(boxes, owners, strict=True):
        there[grid.slices_of_box(box)] |= owner < 2
    decoded = program.merge(partial=True)
    assert (decoded.arrays["kind"][0] == tables.PARTIAL) == (not there.all())

    box = data.draw(boxes_in(shape))
    place = grid.slices_of_box(box)
    if there[place].all():
        (found,) = program.read(decoded, [Request(0, [box])])
        assert np.array_equal(found, program.values[0][place])
        return
    with pytest.raises(InvalidInput, match="this host's part of a checkpoint in local storage") as caught:
        program.read(decoded, [Request(0, [box])])
    assert caught.value.context["array"] == "layer.0"
    shown = re.search(r"\[(.*?)\]", caught.value.message)
    assert shown is not None
    missing = tuple(slice(*map(int, span.split(":"))) for span in shown[1].split(", "))
    assert there[missing].size
    assert not there[missing].any()


def test_what_a_host_holds_wholly_stays_a_grid() -> None:
    halves = [((0, 0), (2, 6)), ((2, 0), (2, 6))]
    written = [[(0, halves[0])], [(0, halves[1]), (1, halves[0])]]
    decoded = Program([(4, 6), (4, 6), (4, 6), (0, 3)], written).merge(partial=True)
    assert decoded.arrays["kind"].tolist() == [
        tables.REGULAR,
        tables.PARTIAL,
        tables.PARTIAL,
        tables.REGULAR,
    ]
    assert decoded.arrays["chunk_count"].tolist() == [2, 1, 0, 0]


def test_overlaps_are_refused_in_a_part_too() -> None:
    written = [[(0, ((0,), (3,)))], [(0, ((2,), (3,)))]]
    with pytest.raises(InvalidInput, match=r"\[2:3\] .* written more than once, by processes \[0, 1\]"):
        Program([(9,)], written).merge(partial=True)


def test_holes_are_refused_where_all_is_shared() -> None:
    with pytest.raises(InvalidInput, match="is written by no process"):
        Program([(9,)], [[(0, ((0,), (3,)))]]).merge()


def test_what_is_lacking_is_named_of_the_parts_that_are_to_be_read_not_of_the_rest() -> None:
    program = Program([(12,)], [[(0, ((0,), (4,)))]])
    decoded = program.merge(partial=True)
    request = Request(0, [((0,), (12,))], missing=[[((2,), (2,)), ((6,), (3,))]])
    with pytest.raises(InvalidInput, match=r"does not have \[6:9\] of array 0"):
        program.read(decoded, [request])
