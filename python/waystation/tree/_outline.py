"""Where the children and the end of each node of a structure are, found once for those who walk it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from waystation.tree._nodes import LEAF
from waystation.tree._structure import Structure


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
