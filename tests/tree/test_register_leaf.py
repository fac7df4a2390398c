"""A class registered as a leaf stays one, whatever is registered later."""

from dataclasses import dataclass

import pytest

from waystation import errors
from waystation.tree import flatten, register_fallback, register_leaf, register_node, unflatten


@dataclass
class LooksLikeAnArray:
    shape: tuple[int, ...]
    dtype: str


def test_a_later_fallback_does_not_open_it() -> None:
    register_leaf(LooksLikeAnArray)
    remove = register_fallback(lambda value: None)
    try:
        value = LooksLikeAnArray((3,), "float32")
        assert flatten([value])[0] == [value]
    finally:
        remove()


class Pair:
    def __init__(self, left: object, right: object) -> None:
        self.left, self.right = left, right


def test_children_may_be_named_by_plain_strings_and_numbers() -> None:
    for keys in (("left", "right"), (0, 1)):
        register_node(
            Pair,
            flatten=lambda pair, keys=keys: (list(zip(keys, (pair.left, pair.right), strict=True)), None),
            unflatten=lambda children, _: Pair(*(child for _, child in children)),
        )
        leaves, structure = flatten({"pair": Pair(1, [2])})
        rebuilt = unflatten(structure, leaves)["pair"]
        assert (rebuilt.left, rebuilt.right) == (1, [2])
    register_node(Pair, flatten=lambda pair: ([(1.5, pair.left)], None), unflatten=lambda *_: None)
    with pytest.raises(errors.InvalidInput, match="cannot name a child"):
        flatten(Pair(1, 2))
