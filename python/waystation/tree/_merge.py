"""Several trees as one: what each has, where no two have the same.

Mappings are merged by key, other containers of one class child by child. Nothing is changed: containers are
made anew, leaves are shared. Invariant: without `overwrite`, every leaf of every tree is in the result.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from waystation._errors import Conflict, InvalidInput
from waystation.tree._keys import DictKey, KeyPath, format_key_path
from waystation.tree._nodes import MAPPING_KINDS, Node
from waystation.tree._registry import Opened, open_unknown, openers
from waystation.tree._structure import Outline, Structure

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


# ---- structures --------------------------------------------------------------------------------
# The structure that holds what two structures hold, where mappings alone have more than one part.
#
# Invariants: nothing is built, so that classes of either need not be here; each leaf of both is in the
# union once; mappings keep the order of the first, with what only the second has behind; both are walked
# once.


_BOTH = 2  # a mapping of both structures, among the numbers of the structures


def union(first: Structure, second: Structure, *, keep_first: bool = False) -> tuple[Structure, list[int]]:
    """Joins two structures.

    Args:
        first: One of them.
        second: The other.
        keep_first: Where both have something other than a mapping, keep what the first has.

    Returns:
        The union, and for each of its leaves which one it was: those of the second are counted from the
        number of leaves of the first.

    Raises:
        Conflict: Both have something at the same place other than a mapping, and the first is not to be kept;
            names the place.
    """
    sides = Outline(first), Outline(second)
    nodes: list[Node] = []
    leaves: list[int] = []
    # What comes next, last first: a place in one structure, or one in each where both have a mapping.
    pending: list[tuple[int, int, int]] = [(_BOTH, 0, 0)]
    while pending:
        which, here, there = pending.pop()
        if which == _BOTH and keep_first and not _are_mappings(sides, here, there):
            which = 0
        if which == _BOTH:
            node, children = _joined(first, sides, here, there)
            nodes.append(node)
            pending += reversed(children)
            continue
        own, begin = sides[which], (here, there)[which]
        nodes += own.nodes[begin : own.ends[begin]]
        offset = first.leaf_count * which
        leaves += [number + offset for number in own.leaves_in(begin)]
    return Structure(nodes, len(leaves)), leaves


def _are_mappings(sides: tuple[Outline, Outline], here: int, there: int) -> bool:
    return all(node.kind in MAPPING_KINDS for node in (sides[0].nodes[here], sides[1].nodes[there]))


def _joined(
    first: Structure, sides: tuple[Outline, Outline], here: int, there: int
) -> tuple[Node, list[tuple[int, int, int]]]:
    """The mapping that two become, and where its children are."""
    have, more = sides[0].nodes[here], sides[1].nodes[there]
    if not _are_mappings(sides, here, there):
        place = format_key_path(first.paths_of([here])[0])
        raise Conflict(f"both have {place}; only what is not there yet can be added", array=place)
    ours = dict(zip(have.keys, sides[0].children(here), strict=True))
    theirs = dict(zip(more.keys, sides[1].children(there), strict=True))
    children = []
    for key, place in ours.items():
        other = theirs.pop(key, None)
        children.append((0, place, 0) if other is None else (_BOTH, place, other))
    children += [(1, 0, place) for place in theirs.values()]
    return Node(have.kind, len(children), (*ours, *theirs)), children
