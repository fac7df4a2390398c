"""Trees as Orbax names them: a path of steps for each leaf, and what becomes of containers.

Orbax knows two kinds of containers, those with names and those with positions. Named tuples, dataclasses and
registered classes are of the first kind, like dicts with keys of any type, whose text is the name; lists,
tuples and numbered children are of the second. Empty containers and None have entries of their own, like
leaves. Invariants: nothing here recurses; in a structure that is built from paths names are sorted, and no
two paths lead to one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from waystation._errors import InvalidInput
from waystation.layouts.orbax.json_files import require
from waystation.tree import AttributeKey, DictKey, Key, Structure
from waystation.tree._keys import key_name
from waystation.tree._nodes import LEAF, MAPPING_KINDS, NONE, SEQUENCE_KINDS, Node

EMPTY_NONE, EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, EMPTY_NAMED = "None", "Dict", "List", "Tuple", "NamedTuple"
EMPTIES = frozenset({EMPTY_NONE, EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE, EMPTY_NAMED})


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: the name of a child, or its position as text."""

    name: str
    is_position: bool = False


Path: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf or an empty container of a structure.

    Attributes:
        path: How it is reached.
        leaf: The number of the leaf; None for an empty container.
        empty: What is empty, one of `EMPTIES`; the empty text for a leaf.
    """

    path: Path
    leaf: int | None
    empty: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """The names along the path."""
        return tuple([step.name for step in self.path])


# ---- structures to paths -----------------------------------------------------------------------


def places_of(structure: Structure) -> list[Place]:
    """The leaves and empty containers of a structure, in preorder."""
    found: list[Place] = []
    above: list[Step] = []
    pending: list[Iterator[Step]] = []  # the steps to children that are still to come
    leaves = 0
    for node in structure.nodes:
        step: Step | None = None
        while pending:
            step = next(pending[-1], None)
            if step is not None:
                break
            pending.pop()
            if above:
                above.pop()
        if node.count:
            if step is not None:
                above.append(step)
            pending.append(iter(_steps(node)))
            continue
        path = (*above, step) if step is not None else ()
        if node is LEAF:
            found.append(Place(path, leaves))
            leaves += 1
        else:
            found.append(Place(path, None, _empty_kind(node)))
    return found


def _steps(node: Node) -> list[Step]:
    if node.kind in SEQUENCE_KINDS:
        return [Step(str(index), is_position=True) for index in range(node.count)]
    return [_step(key) for key in node.child_keys()]


def _step(key: Key) -> Step:
    return Step(key_name(key), not isinstance(key, DictKey | AttributeKey))


def _empty_kind(node: Node) -> str:
    if node is NONE:
        return EMPTY_NONE
    if node.kind in MAPPING_KINDS:
        return EMPTY_DICT
    return {"list": EMPTY_LIST, "tuple": EMPTY_TUPLE}.get(node.kind, EMPTY_NAMED)


def comparable(structure: Structure) -> Structure:
    """The structure with everything forgotten that Orbax does not store, its leaves in the same order: two
    of them match if one can be loaded as the other.

    Raises:
        InvalidInput: Two children of a container have the same text as their name.
    """
    return Structure([_plain(node) for node in structure.nodes], structure.leaf_count)


def _plain(node: Node) -> Node:
    if node is LEAF:
        return node
    if not node.count:
        return NONE
    steps = _steps(node)
    if all(step.is_position for step in steps):
        return Node("list", node.count)
    names = tuple([step.name for step in steps])
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(
            f"two keys of one container have the text {twice!r}, by which Orbax names leaves; rename one"
        )
    return Node("dict", node.count, names)


# ---- paths to structures -----------------------------------------------------------------------

# A container by the steps to its children; an entry by its number.
_Branch: TypeAlias = "dict[Step, _Branch | int]"

_TOP = Step("")


def structure_of(entries: Sequence[tuple[Path, str]]) -> tuple[Structure, list[int]]:
    """The structure of entries, each with its path and, for an empty container, what is empty.

    Where an empty container has children after all, it was a place that was filled later.

    Returns:
        The structure, and for each of its leaves which entry it is.

    Raises:
        ValueError: They are no tree.
    """
    top: _Branch = {}
    for number, (path, empty) in enumerate(entries):
        branch = top
        for step in (_TOP, *path[:-1]) if path else ():
            inner = branch.setdefault(step, {})
            if isinstance(inner, int):
                require(bool(entries[inner][1]), "a leaf has children")
                inner = branch[step] = {}
            branch = inner
        last = path[-1] if path else _TOP
        present = branch.setdefault(last, number)
        if present != number:
            require(
                isinstance(present, dict) and bool(empty), "two leaves are in one place, or one in another"
            )
    require(bool(top), "a tree has no entries")
    return _flattened(top[_TOP], entries)


def _flattened(tree: _Branch | int, entries: Sequence[tuple[Path, str]]) -> tuple[Structure, list[int]]:
    nodes: list[Node] = []
    order: list[int] = []
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            node, children = _container(item)
            nodes.append(node)
            pending.extend(reversed(children))
        elif entries[item][1]:
            nodes.append(_empty_node(entries[item][1]))
        else:
            nodes.append(LEAF)
            order.append(item)
    return Structure(nodes, len(order)), order


def _container(branch: _Branch) -> tuple[Node, list[_Branch | int]]:
    kinds = {step.is_position for step in branch}
    require(len(kinds) == 1, "a container has children with names and with positions")
    if kinds == {False}:
        names = sorted(step.name for step in branch)
        return Node("dict", len(names), tuple(names)), [branch[Step(name)] for name in names]
    present = {step.name: child for step, child in branch.items()}
    positions = [str(position) for position in range(len(present))]
    require(present.keys() == set(positions), "the positions in a list are not those from 0 on")
    return Node("list", len(positions)), [present[position] for position in positions]


def _empty_node(kind: str) -> Node:
    # An empty named tuple comes back as Orbax has it: as None.
    kinds = {EMPTY_DICT: "dict", EMPTY_LIST: "list", EMPTY_TUPLE: "tuple"}
    return Node(kinds[kind], 0) if kind in kinds else NONE
