"""The structure: an immutable description of a tree without its leaves.

Invariants: the nodes stand in preorder in one flat tuple and form exactly one tree; nothing here recurses,
so that depth is bounded by memory alone; leaves are numbered in the order of their nodes. Equality is that
of what a file holds: kinds, tags and keys, not live classes or static data.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from waystation._errors import Corrupt
from waystation.tree._json import decode_nodes, encode_nodes
from waystation.tree._keys import KeyPath, shorten
from waystation.tree._nodes import LEAF, Node

_Part = TypeVar("_Part")
_Path = TypeVar("_Path")


class Structure:
    """What a tree is besides its leaves. Made by `flatten` or `from_json`.

    Attributes:
        nodes: Every node, in preorder.
        leaf_count: The number of leaves.
    """

    __slots__ = ("nodes", "leaf_count")

    def __init__(self, nodes: Sequence[Node], leaf_count: int) -> None:
        self.nodes: tuple[Node, ...] = tuple(nodes)
        self.leaf_count: int = leaf_count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self.leaf_count == other.leaf_count and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash(self.nodes)

    def __repr__(self) -> str:
        return f"<Structure of {self.leaf_count} leaves in {len(self.nodes)} nodes>"

    def key_paths(self) -> list[KeyPath]:
        """The key path of each leaf."""
        return _collect(self.nodes, Node.child_keys, tuple, lambda prefix, key: (*prefix, key))

    def labels(self) -> list[str]:
        """The dotted label of each leaf: for people, not unique."""

        def prefix_of(names: list[str]) -> str:
            return ".".join(shorten(names, "…")) + "." if names else ""

        return _collect(self.nodes, Node.child_names, prefix_of, str.__add__)

    def paths_of(self, positions: Iterable[int]) -> list[KeyPath]:
        """The key paths of the nodes at the given places in `nodes`, in preorder."""
        chosen = set(positions)
        if not chosen:
            return []
        nodes = self.nodes[: max(chosen) + 1]
        return _collect(nodes, Node.child_keys, tuple, lambda prefix, key: (*prefix, key), chosen)

    def to_json(self) -> list[Any]:
        """The structure as a JSON value."""
        return encode_nodes(self.nodes)

    @classmethod
    def from_json(cls, value: Any, *, path: str, leaf_count: int | None = None) -> Structure:
        """Reads what `to_json` made, trusting nothing.

        Args:
            value: The parsed JSON.
            path: The file that it comes from, for messages.
            leaf_count: The number of leaves that the file describes elsewhere, which must agree.

        Raises:
            Corrupt: The value is not a structure.
        """
        nodes = decode_nodes(value, path)
        found = sum(map(operator.is_, nodes, itertools.repeat(LEAF)))
        if leaf_count is not None and found != leaf_count:
            raise Corrupt(f"a tree structure has {found} leaves where {leaf_count} are described", path=path)
        return cls(nodes, found)


def _collect(
    nodes: Sequence[Node],
    parts_of: Callable[[Node], Sequence[_Part]],
    prefix_of: Callable[[list[_Part]], _Path],
    join: Callable[[_Path, _Part], _Path],
    chosen: set[int] | None = None,
) -> list[_Path]:
    """The paths of leaves, or of chosen nodes. A prefix is made once, where its first path is needed, so
    that a deep tree with few leaves costs no more than its nodes."""
    found: list[_Path] = []
    above: list[_Part] = []  # the keys on the way to the open container
    pending: list[list[_Part]] = []  # the keys of children that are still to come, last first
    prefix: _Path | None = None
    passed = 0  # one past the last node whose path was taken together with those of its siblings
    for position, node in enumerate(nodes):
        if position < passed:
            continue
        while pending and not pending[-1]:
            pending.pop()
            if above:
                above.pop()
            prefix = None
        part = pending[-1].pop() if pending else None
        if (node is LEAF) if chosen is None else (position in chosen):
            if prefix is None:
                prefix = prefix_of(above)
            found.append(prefix if part is None else join(prefix, part))
        if node.count:
            if part is not None:
                above.append(part)
            end = position + 1 + node.count
            children = nodes[position + 1 : end] if chosen is None else ()
            if children and children[0] is LEAF and children.count(LEAF) == node.count:
                prefix = prefix_of(above)
                found += [join(prefix, child) for child in parts_of(node)]
                passed = end
                pending.append([])
            else:
                pending.append(list(reversed(parts_of(node))))
            prefix = None
    return found


def open_key_path(nodes: Sequence[Node]) -> KeyPath:
    """The key path of the node that would come next after `nodes`, an unfinished preorder."""
    return Structure([*nodes, LEAF], 0).paths_of([len(nodes)])[0]


class Outline:
    """Where the parts of a structure are.

    Attributes:
        nodes: Of the structure.
        leaf_numbers: For each node the number of leaves before it, and at the end that of all.
        ends: One past the last node below each node.
    """

    def __init__(self, structure: Structure) -> None:
        self.nodes = structure.nodes
        self.leaf_numbers = list(accumulate((node is LEAF for node in self.nodes), initial=0))
        self.ends = self._find_ends()

    def _find_ends(self) -> list[int]:
        ends = list(range(1, len(self.nodes) + 1))
        starts: list[int] = []  # of the subtrees after the current node that have no parent yet
        for position in range(len(self.nodes) - 1, -1, -1):
            count = self.nodes[position].count
            if count:
                ends[position] = ends[starts[-count]]
                del starts[-count:]
            starts.append(position)
        return ends

    def children(self, position: int) -> list[int]:
        """Where the children of a node are."""
        found, child = [], position + 1
        for _ in range(self.nodes[position].count):
            found.append(child)
            child = self.ends[child]
        return found

    def ends_in(self, position: int) -> Iterator[int]:
        """Leaves, Nones and empty containers at or below a node."""
        return (at for at in range(position, self.ends[position]) if not self.nodes[at].count)

    def leaves_in(self, position: int) -> range:
        """The numbers of the leaves at or below a node."""
        return range(self.leaf_numbers[position], self.leaf_numbers[self.ends[position]])
