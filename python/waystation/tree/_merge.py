"""Several trees as one: what each has, where no two have the same.

Mappings are merged by key, other containers of one class child by child. Nothing is changed: containers are
made anew, leaves are shared. Invariant: without `overwrite`, every leaf of every tree is in the result.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from waystation._errors import InvalidInput
from waystation.tree._keys import DictKey, KeyPath, format_key_path
from waystation.tree._registry import Opened, open_unknown, openers

IsLeaf = Callable[[Any], bool]


def merge(*trees: Any, overwrite: bool = False, is_leaf: IsLeaf | None = None) -> Any:
    """Merges trees into one.

    Args:
        trees: The trees; none make an empty dict.
        overwrite: Where two have a leaf at the same place, take that of the later one, unless it is None.
        is_leaf: Asked about every value first; True keeps it whole.

    Raises:
        InvalidInput: Without `overwrite`, two trees have a leaf (or None) at the same place, or containers of
            different classes; or they have sequences of different lengths.
    """
    if not trees:
        return {}
    merging = _Merging(overwrite, is_leaf or (lambda value: False))
    return functools.reduce(lambda before, later: merging.merged(before, later, ()), trees)


class _Merging:
    """The rules of one merge."""

    def __init__(self, overwrite: bool, is_leaf: IsLeaf) -> None:
        self._overwrite = overwrite
        self._is_leaf = is_leaf

    def merged(self, before: Any, later: Any, path: KeyPath) -> Any:
        """What two values at one place become."""
        first, second = self._open(before), self._open(later)
        if first is None or second is None or type(before) is not type(later):
            if not self._overwrite:
                raise InvalidInput(
                    f"two trees have something at {format_key_path(path)} ({_shown(before)} and "
                    f"{_shown(later)}); give overwrite=True to take the later one"
                )
            return before if later is None else later
        if isinstance(later, Mapping):
            return self._mapping(before, later, path)
        return self._children(first, second, path)

    def _open(self, value: Any) -> Opened | None:
        """A container's node and children; None for a leaf, and for None."""
        if value is None or self._is_leaf(value):
            return None
        opener = openers.get(type(value), open_unknown)
        return None if opener is None else opener(value)

    def _mapping(self, before: Mapping[Any, Any], later: Mapping[Any, Any], path: KeyPath) -> Any:
        pairs = dict(before)
        for key, value in later.items():
            own = (*path, DictKey(key))
            pairs[key] = self.merged(pairs[key], value, own) if key in pairs else value
        if isinstance(later, defaultdict):
            return defaultdict(later.default_factory, pairs)
        made: Any = type(later)
        return made(pairs)

    def _children(self, first: Opened, second: Opened, path: KeyPath) -> Any:
        keys, other_keys = first[0].child_keys(), second[0].child_keys()
        if keys != other_keys:
            raise InvalidInput(
                f"two trees have {len(keys)} and {len(other_keys)} children in the {second[0].kind} at "
                f"{format_key_path(path)}, or others; only mappings can be merged then"
            )
        return second[0].build(
            [self.merged(a, b, (*path, key)) for key, a, b in zip(keys, first[1], second[1], strict=True)]
        )


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
