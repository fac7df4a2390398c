"""Trees to leaves and back, without recursion.

Invariants: leaves come in preorder, dict entries in insertion order; a container is never changed; a cycle
is an error, a container that occurs twice side by side is stored twice; an error raised by a class's own
flatten or unflatten function carries a note with the key path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from waystation._errors import InvalidInput, WaystationError
from waystation.tree._keys import format_key_path
from waystation.tree._nodes import LEAF, NONE, Node
from waystation.tree._registry import Opened, open_unknown, openers
from waystation.tree._structure import Structure, open_key_path

_CLOSED = object()


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """Takes a tree apart.

    Args:
        tree: Any nesting of dicts, lists, tuples, None, named tuples, dataclasses and registered classes.
        is_leaf: Asked about every value first; True keeps it whole, as a leaf.

    Returns:
        The leaves in order, and the structure that puts them together again.

    Raises:
        InvalidInput: A container contains itself, or a node names two children alike.
        Unsupported: A dict has a key that cannot be stored.
    """
    leaves: list[Any] = []
    nodes: list[Node] = []
    enclosing: set[int] = set()  # identities of the containers on the way to the current value
    pending: list[tuple[Iterator[Any], Any]] = [(iter((tree,)), None)]
    while pending:
        children, container = pending[-1]
        for value in children:
            opened = None
            if is_leaf is None or not is_leaf(value):
                opener = openers.get(type(value), _CLOSED)
                if opener is not None:
                    opened = _open(value, opener, nodes)
            if opened is None:
                leaves.append(value)
                nodes.append(LEAF)
                continue
            if id(value) in enclosing:
                raise InvalidInput("a container contains itself", key_path=_shown(nodes))
            node, values = opened
            nodes.append(node)
            if node.count:
                own = list(values)
                if is_leaf is None and all(map(_is_leaf_type, set(map(type, own)))):
                    leaves += own
                    nodes += [LEAF] * len(own)
                    continue
                enclosing.add(id(value))
                pending.append((iter(own), value))
                break
        else:
            pending.pop()
            enclosing.discard(id(container))
    return leaves, Structure(nodes, len(leaves))


def _is_leaf_type(kind: type) -> bool:
    """Whether all values of a type are known to be leaves."""
    return openers.get(kind, _CLOSED) is None


def _open(value: Any, opener: Any, nodes: Sequence[Node]) -> Opened | None:
    try:
        opened: Opened | None = open_unknown(value) if opener is _CLOSED else opener(value)
    except WaystationError as error:
        error.where(key_path=_shown(nodes))
        raise
    except Exception as error:
        error.add_note(f"while taking apart a {type(value).__qualname__} at {_shown(nodes)}")
        raise
    return opened


def _shown(nodes: Sequence[Node]) -> str:
    return format_key_path(open_key_path(nodes))


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Puts a tree together: the inverse of `flatten`.

    Raises:
        InvalidInput: There are more or fewer leaves than the structure has.
    """
    remaining = list(leaves)
    if len(remaining) != structure.leaf_count:
        raise InvalidInput(f"{len(remaining)} leaves were given for a tree of {structure.leaf_count}")
    remaining.reverse()
    built: list[Any] = []  # values whose parent is not built yet, the first child on top
    begin = end = 0  # of the leaves that come next, and those that are not among `built` yet
    for position in range(len(structure.nodes) - 1, -1, -1):
        node = structure.nodes[position]
        if node is LEAF:
            end += 1
            continue
        built += remaining[begin:end]
        begin = end
        if node.kind == "none":
            built.append(None)
        else:
            first = len(built) - node.count
            children = built[first:]
            del built[first:]
            children.reverse()
            built.append(_build(structure, position, children))
    return built[0] if built else remaining[0]


def _build(structure: Structure, position: int, children: list[Any]) -> Any:
    node = structure.nodes[position]
    try:
        return node.build(children)
    except Exception as error:
        (path,) = structure.paths_of([position])
        error.add_note(f"while building a {node.tag or node.kind} at {format_key_path(path)}")
        raise


_UNKNOWN = object()


def iterate_leaves(tree: Any) -> Iterator[Any]:
    """The leaves, in the order of `flatten`.

    A container is gone into once, so the tree may contain itself; what cannot be taken apart, which `flatten`
    refuses with its key path, counts as a leaf. Without recursion: a tree may be deeper than Python's stack.
    """
    waiting: list[Any] = [tree]
    seen: dict[int, Any] = {}  # containers by identity; kept, since some are made by taking others apart
    while waiting:
        value = waiting.pop()
        children = _children(value)
        if children is None:
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value
            waiting.extend(reversed(list(children)))


def _children(value: Any) -> Iterable[Any] | None:
    opener = openers.get(type(value), _UNKNOWN)
    if opener is None:
        return None
    try:
        opened = open_unknown(value) if opener is _UNKNOWN else opener(value)  # type: ignore[operator]
    except Exception:  # of a class's own function, which may raise anything
        return None
    return None if opened is None else opened[1]


# ---- without classes ---------------------------------------------------------------------------
# Trees for a process that has none of their classes: containers that are what a structure says, and no
# more.
#
# Invariant: what `unflatten` makes of the plain structure has, taken apart, the very same structure, down
# to what distinguishes kinds of mappings and to static data that is not there; no class is asked for
# anything.


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


def _open_plain(value: PlainNode) -> Opened:
    return _plain(value.node), value.children


openers[PlainNode] = _open_plain
