"""Which stored leaf each wanted leaf is.

Containers of different classes match when their children are named alike: list, tuple and numbered children
by position; string keys and attributes by name; other keys of mappings by their value (so the key 0 is not
position 0). None matches None; an empty container matches any empty container. What may differ all the same
is a `Tolerance`: wanted leaves that stand for nothing, and what the checkpoint has beyond what is wanted.

Invariants: both structures are walked side by side, in time linear in their nodes; each leaf is matched at
most once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from waystation.tree._keys import AttributeKey, DictKey, Key, KeyPath
from waystation.tree._nodes import LEAF, MAPPING_KINDS, NONE, SEQUENCE_KINDS, Node
from waystation.tree._structure import Outline, Structure


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may differ between two structures that match.

    Attributes:
        placeholders: Wanted leaves that take nothing from the checkpoint, whatever it has there: a leaf, a
            tree, or nothing.
        subset: Whether the checkpoint may have more than is wanted.
    """

    placeholders: frozenset[int] = frozenset()
    subset: bool = False


EXACT = Tolerance()


class Mismatch:
    """Two structures that do not match in full.

    Attributes:
        leaves: For each wanted leaf the stored leaf, or -1 where there is none.
        missing: Places in `wanted.nodes` of leaves, Nones and empty containers that the checkpoint lacks.
        unexpected: Places in `stored.nodes` of those that were not asked for.
        clashes: For places in `missing` the one in `unexpected` of the same path: where one tree has None,
            say, and the other a leaf.
    """

    __slots__ = ("stored", "wanted", "leaves", "missing", "unexpected", "clashes")

    def __init__(
        self,
        stored: Structure,
        wanted: Structure,
        leaves: list[int],
        missing: list[int],
        unexpected: list[int],
        clashes: Mapping[int, int],
    ) -> None:
        self.stored: Structure = stored
        self.wanted: Structure = wanted
        self.leaves: list[int] = leaves
        self.missing: list[int] = missing
        self.unexpected: list[int] = unexpected
        self.clashes: Mapping[int, int] = clashes

    def __repr__(self) -> str:
        return f"<Mismatch: {len(self.missing)} missing, {len(self.unexpected)} unexpected>"

    def missing_paths(self, limit: int | None = None) -> list[KeyPath]:
        """Key paths of what the checkpoint lacks, in order."""
        return self.wanted.paths_of(self.missing[:limit])

    def unexpected_paths(self, limit: int | None = None) -> list[KeyPath]:
        """Key paths of what only the checkpoint has, in order."""
        return self.stored.paths_of(self.unexpected[:limit])


def match(stored: Structure, wanted: Structure, tolerance: Tolerance = EXACT) -> list[int] | Mismatch:
    """Finds the stored leaf of the same path for each wanted leaf; -1 for a placeholder without one."""
    if stored == wanted:
        return list(range(wanted.leaf_count))
    walk = _Walk(stored, wanted, tolerance)
    walk.run()
    if not walk.missing and not walk.unexpected:
        return walk.leaves
    return Mismatch(stored, wanted, walk.leaves, sorted(walk.missing), sorted(walk.unexpected), walk.clashes)


class _Walk:
    """The walk over two structures side by side."""

    def __init__(self, stored: Structure, wanted: Structure, tolerance: Tolerance) -> None:
        self.stored = Outline(stored)
        self.wanted = Outline(wanted)
        self.tolerance = tolerance
        self.leaves = [-1] * wanted.leaf_count
        self.missing: list[int] = []
        self.unexpected: list[int] = []
        self.clashes: dict[int, int] = {}

    def run(self) -> None:
        pairs = [(0, 0)]
        while pairs:
            here, there = pairs.pop()
            have, want = self.stored.nodes[here], self.wanted.nodes[there]
            if have is LEAF and want is LEAF:
                self.leaves[self.wanted.leaf_numbers[there]] = self.stored.leaf_numbers[here]
            elif _is_container(have) and _is_container(want):
                self._pair_children(here, there, pairs)
            elif not (have is NONE and want is NONE) and not self._is_placeholder(there):
                missing, unexpected = list(self._missed(there)), list(self.stored.ends_in(here))
                self.missing += missing
                self.unexpected += unexpected
                if (missing, unexpected) == ([there], [here]):
                    self.clashes[there] = here

    def _is_placeholder(self, there: int) -> bool:
        number = self.wanted.leaf_numbers[there]
        return self.wanted.nodes[there] is LEAF and number in self.tolerance.placeholders

    def _missed(self, there: int) -> Iterator[int]:
        return (end for end in self.wanted.ends_in(there) if not self._is_placeholder(end))

    def _pair_children(self, here: int, there: int, pairs: list[tuple[int, int]]) -> None:
        have, want = self.stored.nodes[here], self.wanted.nodes[there]
        ours, theirs = self.stored.children(here), self.wanted.children(there)
        if have == want:
            pairs += zip(ours, theirs, strict=True)
            return
        by_name = dict(zip(_names(have), ours, strict=True))
        for name, child in zip(_names(want), theirs, strict=True):
            if name in by_name:
                pairs.append((by_name.pop(name), child))
            else:
                self.missing += self._missed(child)
        if not self.tolerance.subset:
            for child in by_name.values():
                self.unexpected += self.stored.ends_in(child)


def _is_container(node: Node) -> bool:
    return node is not LEAF and node is not NONE


def _names(node: Node) -> Sequence[Hashable]:
    """The names by which the children of a container match those of another class."""
    if node.kind in SEQUENCE_KINDS:
        return range(node.count)
    if node.kind in MAPPING_KINDS and set(map(type, node.keys)) <= {str}:
        return node.keys
    keys = node.child_keys()
    names = [_name(key) for key in keys]
    return names if len(set(names)) == len(names) else keys


def _name(key: Key) -> Hashable:
    if isinstance(key, DictKey):
        return key.key if type(key.key) is str else key
    return key.name if isinstance(key, AttributeKey) else key.index
