"""`tree.merge`, beside the one of Orbax."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as oracle

from waystation.tree import merge


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    x: Any
    y: Any


MERGED: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "one": ({"a": 1},),
    "disjoint": ({"a": 1, "b": {"c": 2}}, {"d": 3, "b": {"e": 4}}),
    "three": ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"d": [3]}}),
    "beside an empty one": ({"a": {}}, {"a": {"b": 1}}),
    "ordered": (OrderedDict(a=1), OrderedDict(b=2)),
    "inside of a list": ([{"a": 1}, {}], [{"b": 2}, {"c": 3}]),
    "inside of a tuple": (({"a": 1},), ({"b": 2},)),
    "inside of a named tuple": (Pair({"a": 1}, {}), Pair({"b": 2}, {"c": 3})),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "a leaf of both": ({"a": 1}, {"a": 2}),
    "the same leaf": ({"a": {"b": 1}}, {"a": {"b": 1}}),
    "None": ({"a": None}, {"a": 1}),
    "a leaf and a tree": ({"a": 1}, {"a": {"b": 1}}),
    "other classes": ({"a": {"b": 1}}, {"a": OrderedDict(c=1)}),
    "other lengths": ({"a": [{"b": 1}]}, {"a": [{"c": 1}, {"d": 1}]}),
    "lists of leaves": ([1], [2]),
}


@pytest.mark.parametrize("case", MERGED)
def test_trees_are_merged_as_orbax_does(case: str) -> None:
    trees = MERGED[case]
    merged, expected = merge(*trees), oracle.tree.merge(*trees)
    assert merged == expected
    assert jax.tree.structure(merged) == jax.tree.structure(expected)


@pytest.mark.parametrize("case", REFUSED)
def test_what_orbax_refuses_is_refused(case: str) -> None:
    trees = REFUSED[case]
    with pytest.raises(ValueError):  # noqa: PT011  # whatever Orbax says of it
        oracle.tree.merge(*trees)
    with pytest.raises(ValueError, match="two trees have"):
        merge(*trees)


@pytest.mark.parametrize(
    "trees",
    [
        ({"a": 1, "b": {"c": 2}}, {"a": 100}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None, "c": 3}}),
        ([1, 2], [3, None]),
        (Pair(1, 2), Pair(3, {"a": 4})),
        (Node(1, 2), Node(3, 4)),
    ],
)
def test_the_later_one_wins_where_that_is_asked_for(trees: tuple[Any, ...]) -> None:
    assert merge(*trees, overwrite=True) == oracle.tree.merge(*trees, overwrite=True)


def test_nothing_is_changed_and_classes_stay() -> None:
    first = defaultdict(list, a={"x": np.arange(3)})
    second = defaultdict(list, a={"y": 1})
    merged = merge(first, second)
    assert first.keys() == {"a"}
    assert first["a"].keys() == {"x"}
    assert isinstance(merged, defaultdict)
    assert merged["new"] == []
    assert merged["a"]["x"] is first["a"]["x"]


def test_values_can_be_kept_whole() -> None:
    def is_pair(value: Any) -> bool:
        return isinstance(value, Pair)

    with pytest.raises(ValueError, match=r"\['p'\]"):
        merge({"p": Pair({}, {})}, {"p": Pair({}, {})}, is_leaf=is_pair)
    later = Pair({}, {"b": 2})
    assert merge({"p": Pair({"a": 1}, {})}, {"p": later}, overwrite=True, is_leaf=is_pair)["p"] is later
