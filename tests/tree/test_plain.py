"""Trees without their classes have the same structure; leaves are found in whatever there is."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import given
from tests.tree.strategies import trees

from waystation.tree import Structure, flatten, iterate_leaves, plain, unflatten


class Pair(NamedTuple):
    first: Any
    second: Any


@given(trees)
def test_what_is_built_plainly_is_the_same_taken_apart(tree: Any) -> None:
    leaves, structure = flatten([tree, Pair(tree, ())])
    again = Structure.from_json(structure.to_json(), path="here")
    built = unflatten(plain(again), leaves)
    found_leaves, found = flatten(built)
    assert found_leaves == leaves
    assert found.to_json() == structure.to_json()
    assert flatten(unflatten(found, leaves))[1].to_json() == structure.to_json()


def test_no_class_is_asked_for_anything() -> None:
    pair = Pair(1, 2)
    _, structure = flatten({"pair": pair})
    assert type(unflatten(structure, [1, 2])["pair"]) is Pair
    (built,) = unflatten(plain(structure), [1, 2]).children
    assert (built.node.tag, built.children) == (f"{__name__}.Pair", [1, 2])


@given(trees)
def test_leaves_are_those_of_flatten(tree: Any) -> None:
    assert list(iterate_leaves(tree)) == flatten(tree)[0]
