"""A class registered as a leaf stays one, whatever is registered later."""

from dataclasses import dataclass

from waystation.tree import flatten, register_fallback, register_leaf


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
