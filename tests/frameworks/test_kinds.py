"""`targets_by_kind`: each kind is decided once, and errors say which array they are about."""

from __future__ import annotations

from typing import Any

import pytest

from waystation.errors import InvalidInput
from waystation.frameworks.base import StoredArray, Target
from waystation.frameworks.kinds import targets_by_kind


def stored(shape: tuple[int, ...]) -> StoredArray:
    return StoredArray(shape, "float32", "numpy", "F32", shape, None, {})


def test_arrays_of_one_kind_share_a_target() -> None:
    asked: list[int] = []

    def choose(array: StoredArray, dtype: str, place: Any, index: int) -> Target:
        asked.append(index)
        return Target(array.shape, dtype, [], place)

    row, cube = stored((3,)), stored((2, 2, 2))
    here, there = object(), object()
    found = targets_by_kind(
        choose,
        [row, cube, row, row, row, cube],
        ["float32", "float32", "float32", "float16", "float32", "float32"],
        [here, here, here, here, there, here],
    )
    assert asked == [0, 1, 3, 4]
    assert [(target.shape, target.dtype, target.placement) for target in found] == [
        ((3,), "float32", here),
        ((2, 2, 2), "float32", here),
        ((3,), "float32", here),
        ((3,), "float16", here),
        ((3,), "float32", there),
        ((2, 2, 2), "float32", here),
    ]
    assert found[0] is found[2]
    assert found[1] is found[5]


def test_an_error_is_about_the_first_of_its_kind() -> None:
    def choose(array: StoredArray, dtype: str, place: Any, index: int) -> Target:
        if array.shape == (4,):
            raise InvalidInput("not this one")
        return Target(array.shape, dtype, [], place)

    row, other = stored((3,)), stored((4,))
    with pytest.raises(InvalidInput) as caught:
        targets_by_kind(choose, [row, other, other], ["float32"] * 3, [None] * 3)
    assert caught.value.context["index"] == 1
