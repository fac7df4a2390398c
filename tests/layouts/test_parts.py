"""What processes say of their files: alike where they are alike, and refused where they disagree."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layouts.plans import Program, partitions
from tests.layouts.test_runs import PROCESSES, program

from waystation import grid
from waystation.errors import Corrupt, InvalidInput
from waystation.layouts.native import merge
from waystation.layouts.native.parts import Part, Recipe
from waystation.layouts.opened import Request


def test_processes_that_do_the_same_say_the_same() -> None:
    parts = program().parts
    assert len({part.recipe for part in parts}) == 3 + 1 + 1  # owners of three arrays, the last one, the rest
    assert len(parts[8].encode()) < 500
    recipe = Recipe.decode(parts[8].recipe)
    assert recipe.arrays.tolist() == [0, 1, 2]
    assert recipe.boxes.tolist() == [0, 1, 2]
    assert recipe.ndims.tolist() == [2, 2, 1]
    assert recipe.extents.tolist() == [2, 5, 3, 4, 2]
    assert parts[8].offsets.tolist() == [16, 0, 3, 0, 16]


@given(data=st.data())
def test_whatever_is_written_is_found(data: Any) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5))
    written: list[list[tuple[int, grid.Box]]] = [[], [], []]
    for array, shape in enumerate(shapes):
        boxes = data.draw(partitions(shape)) if shape and all(shape) else [grid.whole(shape)]
        for box in boxes:
            written[data.draw(st.integers(0, 2))].append((array, box))
    whole = Program(shapes, written, file_bytes_target=data.draw(st.sampled_from([40, 1 << 20])))
    assert [len(part.encode()) for part in whole.parts] == [
        len(Part.decode(part.encode()).encode()) for part in whole.parts
    ]
    decoded = whole.merge()
    requests = [Request(array, [grid.whole(shape)]) for array, shape in enumerate(shapes)]
    for array, found in enumerate(whole.read(decoded, requests)):
        assert np.array_equal(found, whole.values[array])
    by_label = merge.whole_arrays(whole.parts, whole.labels)
    alone = {
        array
        for own in written
        for array, box in own
        if box == grid.whole(shapes[array]) and grid.volume(box)
    }
    assert sorted(by_label) == sorted(whole.labels[array] for array in alone)


def test_checksums_stand_in_the_order_of_the_files() -> None:
    decoded = program().merge()
    assert decoded.checksums[:].tolist() == [1 + 1000 * process for process in range(PROCESSES)]
    assert decoded.files["first_block"].tolist() == list(range(PROCESSES))


def test_other_dtypes_in_another_process_are_refused() -> None:
    whole = program()
    whole.sources[1] = dataclasses.replace(whole.sources[1], storage_item_bytes=4)
    with pytest.raises(InvalidInput, match=r"process 0 has written files of other lengths"):
        whole.merge()


def test_another_number_of_axes_in_another_process_is_refused() -> None:
    whole = program()
    whole.sources[2] = dataclasses.replace(whole.sources[2], storage_shape=(PROCESSES * 2 - 1, 1))
    with pytest.raises(InvalidInput, match="array 2 with another number of axes"):
        whole.merge()


def test_a_process_with_other_files_than_it_says_is_refused() -> None:
    whole = program()
    changed = whole.parts[3]
    whole.parts[3] = Part(np.repeat(changed.files, 2), changed.recipe, changed.offsets, changed.checksums)
    with pytest.raises(InvalidInput, match="process 3 has written files of other lengths"):
        whole.merge()


@pytest.mark.parametrize("place", [0, 8, -1])
def test_bytes_that_no_process_wrote_are_corrupt(place: int) -> None:
    encoded = bytearray(program().parts[0].encode())
    del encoded[place]
    with pytest.raises(Corrupt, match="not what a process wrote"):
        Part.decode(bytes(encoded))
    with pytest.raises(Corrupt, match="damaged"):
        Recipe.decode(b"\0" * 20)
