"""Trees for a process that has none of their classes: containers that are what a structure says, and no more.

Invariant: what `unflatten` makes of the plain structure has, taken apart, the very same structure, down to
what distinguishes kinds of mappings and to static data that is not there; no class is asked for anything.
"""

from __future__ import annotations

import functools
from typing import Any

from waystation.tree._nodes import LEAF, NONE, Node
from waystation.tree._registry import Opened, openers
from waystation.tree._structure import Structure


class PlainNode:
    """A container of which only its node is known.

    Attributes:
        node: What a file says of it.
        children: In order.
    """

    __slots__ = ("children", "node")

    def __init__(self, node: Node, children: list[Any]) -> None:
        self.node = node
        self.children = children

    def __repr__(self) -> str:
        return f"PlainNode({self.node!r}, {self.children!r})"


def plain(structure: Structure) -> Structure:
    """The same structure, of which `unflatten` makes containers that need no class."""
    nodes = [node if node is LEAF or node is NONE else _plain(node) for node in structure.nodes]
    return Structure(nodes, structure.leaf_count)


def _plain(node: Node) -> Node:
    rebuild = functools.partial(PlainNode, node)
    return Node(node.kind, node.count, node.keys, node.tag, node.has_static, rebuild)


def _open(value: PlainNode) -> Opened:
    return _plain(value.node), value.children


openers[PlainNode] = _open
