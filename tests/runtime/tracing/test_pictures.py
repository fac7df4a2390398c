"""Pictures of shardings, and what arrays show of themselves."""

from __future__ import annotations

import pytest

from waystation.runtime.ir import Sharding, replicated
from waystation.runtime.tracing.pictures import picture, picture_html

MESH = (("x", 2), ("y", 2))

PICTURES = {
    "a vector over both axes": (
        (8,),
        Sharding(MESH, (("x", "y"),)),
        "┌───┬───┬───┬───┐\n│ 0 │ 1 │ 2 │ 3 │\n└───┴───┴───┴───┘",
    ),
    "a matrix": (
        (4, 8),
        Sharding(MESH, (("y",), ("x",))),
        "┌───┬───┐\n│ 0 │ 2 │\n├───┼───┤\n│ 1 │ 3 │\n└───┴───┘",
    ),
    "rows with replicas": ((4, 8), Sharding(MESH, (("x",),)), "┌─────┐\n│ 0,1 │\n├─────┤\n│ 2,3 │\n└─────┘"),
    "the last of three axes": (
        (2, 4, 8),
        Sharding(MESH, ((), (), ("x",))),
        "┌─────┬─────┐\n│ 0,1 │ 2,3 │\n└─────┴─────┘",
    ),
    "a scalar": ((), replicated(2), "┌─────┐\n│ 0,1 │\n└─────┘"),
    "three axes divided": (
        (2, 2, 2),
        Sharding((("x", 2), ("y", 2), ("z", 2)), (("x",), ("y",), ("z",))),
        "2 x 2 x 2 parts over 8 devices",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    shape, sharding, wanted = PICTURES[name]
    assert picture(shape, sharding) == wanted


def test_a_notebook_gets_a_table() -> None:
    html = picture_html("a < b", (4,), Sharding(MESH, (("x",),)))
    assert html.startswith("<div>a &lt; b</div><table")
    assert html.count("<td") == 2
