"""Which stored leaf each wanted leaf is, and how two trees differ when they do.

Containers of different classes match when their children are named alike: list, tuple and numbered children
by position; string keys and attributes by name; other keys of mappings by their value (so the key 0 is not
position 0). None matches None; an empty container matches any empty container. What may differ all the same
is a `Tolerance`: wanted leaves that stand for nothing, and what the checkpoint has beyond what is wanted.

Invariants: both structures are walked side by side, in time linear in their nodes; each leaf is matched at
most once; key paths are made only for differences that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from waystation.tree._keys import AttributeKey, DictKey, Key, KeyPath, format_key_path
from waystation.tree._nodes import LEAF, MAPPING_KINDS, NONE, SEQUENCE_KINDS, Node
from waystation.tree._outline import Outline
from waystation.tree._structure import Structure

LeafText = Callable[[int], "str | None"]


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
        self.stored = stored
        self.wanted = wanted
        self.leaves = leaves
        self.missing = missing
        self.unexpected = unexpected
        self.clashes = clashes

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


def describe_difference(
    stored: Structure,
    wanted: Structure,
    stored_leaf_text: LeafText,
    wanted_leaf_text: LeafText,
    *,
    tolerance: Tolerance = EXACT,
    limit: int = 20,
) -> str:
    """A text of one line per difference, at most `limit` of them; empty if there is none.

    Args:
        stored: The structure in the checkpoint.
        wanted: The structure of the abstract state.
        stored_leaf_text: Describes what has to agree of a leaf, by its number: `shape (3,)`.
        wanted_leaf_text: The same of a wanted leaf; None where anything will do.
        tolerance: What is no difference.
        limit: The most lines; one more then counts the rest.
    """
    outcome = match(stored, wanted, tolerance)
    if isinstance(outcome, list):
        outcome = Mismatch(stored, wanted, outcome, [], [], {})
    differing = _differing_leaves(outcome, stored_leaf_text, wanted_leaf_text)
    differing |= _differing_kinds(outcome, stored_leaf_text, wanted_leaf_text)
    paired = set(outcome.clashes.values())
    missing = [place for place in outcome.missing if place not in outcome.clashes]
    unexpected = [place for place in outcome.unexpected if place not in paired]
    total = len(missing) + len(unexpected) + len(differing)
    apart = Mismatch(stored, wanted, outcome.leaves, missing, unexpected, {})
    lines = list(islice(_lines(apart, differing, limit), limit))
    if total > len(lines):
        lines.append(f"  … and {total - len(lines)} more differences")
    return "\n".join(lines)


def _differing_leaves(outcome: Mismatch, stored_text: LeafText, wanted_text: LeafText) -> dict[int, str]:
    """What differs in the leaves that both trees have, by place in the wanted tree."""
    places = [place for place, node in enumerate(outcome.wanted.nodes) if node is LEAF]
    differing = {}
    for number, stored_number in enumerate(outcome.leaves):
        want = wanted_text(number) if stored_number >= 0 else None
        have = stored_text(stored_number) if want is not None else None
        if have is not None and have != want:
            differing[places[number]] = f"{have} in the checkpoint, {want} wanted"
    return differing


def _differing_kinds(outcome: Mismatch, stored_text: LeafText, wanted_text: LeafText) -> dict[int, str]:
    """What stands at the paths at which only one tree has a leaf, by place in the wanted tree."""
    if not outcome.clashes:
        return {}
    stored, wanted = Outline(outcome.stored), Outline(outcome.wanted)
    differing = {}
    for there, here in sorted(outcome.clashes.items()):
        have, want = _kind(stored, here, stored_text), _kind(wanted, there, wanted_text)
        differing[there] = f"{have} in the checkpoint, {want} wanted"
    return differing


def _kind(outline: Outline, place: int, leaf_text: LeafText) -> str:
    node = outline.nodes[place]
    if node is LEAF:
        return leaf_text(outline.leaf_numbers[place]) or "a leaf"
    return "None" if node is NONE else "an empty container"


def _lines(outcome: Mismatch, differing: dict[int, str], limit: int) -> Iterator[str]:
    for path in outcome.unexpected_paths(limit):
        yield f"- {format_key_path(path)}: only in the checkpoint"
    for path in outcome.missing_paths(limit):
        yield f"+ {format_key_path(path)}: only in the abstract state"
    shown = dict(islice(differing.items(), limit))
    paths = outcome.wanted.paths_of(shown)
    for path, text in zip(paths, shown.values(), strict=True):
        yield f"! {format_key_path(path)}: {text}"
