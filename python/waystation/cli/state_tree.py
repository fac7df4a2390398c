"""What is in a checkpointable, for people and for programs: the tree of a state, or the files of a handler.

A tree becomes lines of a table: names and guides, what each leaf is, its size and placement. Whatever files
say is printed so that it cannot control a terminal.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.layouts.opened import ArrayLeaf, Opened, Scalar, StoredTree
from waystation.tree import DictKey, Key, format_key_path

_SHOWN_CHARACTERS = 60


class _Sizes(Protocol):
    """Bytes of arrays, by number."""

    def __getitem__(self, number: int, /) -> int: ...


def document(tree: StoredTree, chunk_count: Callable[[int], int]) -> dict[str, Any]:
    """A state for programs; `chunk_count` gives the number of chunks of an array, by its number."""
    sizes = _array_bytes(tree)
    leaves = [
        {"path": format_key_path(path), **_leaf_document(tree, leaf, sizes, chunk_count)}
        for path, leaf in zip(tree.structure.key_paths(), tree.leaves, strict=True)
    ]
    return {"arrays": len(tree.arrays), "array_bytes": sum(sizes), "leaves": leaves}


@dataclass(frozen=True, slots=True)
class SeenState:
    """A state that stays open, to be shown part by part: it may have a hundred thousand leaves.

    Attributes:
        opened: The state.
        held: What its document says besides: its files.
        chunk_count: Gives the number of chunks of an array, by its number.
    """

    opened: Opened
    held: dict[str, Any]
    chunk_count: Callable[[int], int]

    def document(self) -> dict[str, Any]:
        """What `inspect` says of it, but for its leaves."""
        tree = self.opened.tree
        totals = {"arrays": len(tree.arrays), "array_bytes": sum(_array_bytes(tree)), "leaves": []}
        return {**self.held, **totals}

    def rows(self) -> list[Row]:
        """The lines of the tree, in preorder, with the sums of what is below them."""
        return list(_rows(self.opened.tree, None))

    def leaf(self, number: int) -> dict[str, Any]:
        """What `inspect` says of one leaf."""
        tree = self.opened.tree
        leaf, sizes = tree.leaves[number], _LazySizes(tree)
        places = (at for at, node in enumerate(tree.structure.nodes) if node.kind == "leaf")
        (path,) = tree.structure.paths_of([next(itertools.islice(places, number, None))])
        return {"path": format_key_path(path), **_leaf_document(tree, leaf, sizes, self.chunk_count)}


class _LazySizes:
    """Bytes of arrays, by number, of those that are asked for."""

    def __init__(self, tree: StoredTree) -> None:
        self._tree = tree

    def __getitem__(self, number: int) -> int:
        return _nbytes(self._tree.arrays[number])


@dataclass(frozen=True, slots=True)
class Seen:
    """A checkpoint that stays open.

    Attributes:
        head: What `inspect` says of it as a whole.
        parts: Its checkpointables by name: states, and the documents of what handlers saved.
    """

    head: dict[str, Any]
    parts: dict[str, SeenState | dict[str, Any]]

    @property
    def states(self) -> dict[str, SeenState]:
        """Its states, by name."""
        return {name: part for name, part in self.parts.items() if isinstance(part, SeenState)}

    def document(self) -> dict[str, Any]:
        """What `inspect` says, but for the leaves of states."""
        documents = {
            name: part.document() if isinstance(part, SeenState) else part
            for name, part in self.parts.items()
        }
        return {**self.head, "checkpointables": documents}


def totals(tree: StoredTree) -> str:
    """How many arrays and other values a state has, and their bytes."""
    by_framework = Counter(_made_by(array) for array in tree.arrays)
    made_by = ", ".join(f"{number} {name}" for name, number in sorted(by_framework.items()))
    others = len(tree.leaves) - len(tree.arrays)
    parts = [formatting.count(len(tree.arrays), "array") + (f" ({made_by})" if made_by else "")]
    if others:
        parts.append(formatting.count(others, "other value"))
    return ", ".join([*parts, formatting.size(sum(_array_bytes(tree)))])


def show_facts(output: Output, title: str, facts: Mapping[str, str]) -> None:
    """Prints what is known of a checkpoint as a whole."""
    output.line(title, style="bold")
    width = max(map(len, facts))
    for name, fact in facts.items():
        output.line(f"  {name:<{width}}  {fact}")


def show(output: Output, title: str, tree: StoredTree, depth: int | None) -> None:
    """Prints a state down to a depth; containers have the sums of what is below them."""
    from rich.text import Text

    output.line()
    output.line(title, style="bold")
    table = _table()
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(tree, depth):
        cells = (row.guide + row.name, row.description, row.size, row.placement)
        table.add_row(*(Text(formatting.plain(cell)) for cell in cells), style=None if row.is_leaf else "dim")
    output.show(table)


def show_files(output: Output, name: str, handler: str | None, files: Mapping[str, int]) -> None:
    """Prints the files of a checkpointable that a handler saved, with their lengths in bytes."""
    from rich.text import Text

    total = formatting.size(sum(files.values()))
    output.line()
    output.line(f"{name}: {total} in {formatting.count(len(files), 'file')}", style="bold")
    output.line(f"  saved by {formatting.plain(handler or 'a handler that it does not name')}", style="dim")
    table = _table()
    table.add_column(justify="right", no_wrap=True)
    for path, nbytes in sorted(files.items()):
        table.add_row(Text(f"  {formatting.plain(path)}"), Text(formatting.size(nbytes)))
    output.show(table)


def _table() -> Any:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis")
    return table


def _leaf_document(
    tree: StoredTree, leaf: ArrayLeaf | Scalar, sizes: _Sizes, chunk_count: Callable[[int], int]
) -> dict[str, Any]:
    if not isinstance(leaf, ArrayLeaf):
        is_json = isinstance(leaf, bool | float | str) or (isinstance(leaf, int) and leaf.bit_length() <= 64)
        return {"kind": type(leaf).__name__, "value": leaf if is_json else _value_text(leaf)}
    stored = tree.arrays[leaf.array]
    return {
        "kind": "array",
        "name": tree.labels[leaf.array],
        "shape": list(stored.shape),
        "dtype": stored.dtype,
        "framework": stored.framework,
        "sharding": stored.sharding,
        "chunks": chunk_count(leaf.array),
        "bytes": sizes[leaf.array],
    }


@dataclass(slots=True)
class Row:
    """One node of the tree, as a line.

    Attributes:
        parent: The number of the line of its container; -1 of the root.
        depth: How many containers it is in.
        is_last: Whether it is the last of its container.
        is_leaf: Whether it contains nothing.
        name: Its key.
        description: What it is.
        nbytes: Bytes of the arrays that it is, or has below it.
        leaves: Leaves that it is, or has below it.
        number: Its number among the leaves; -1 of a container, and of None.
        guide: The lines of the table that lead to it.
        size: Its bytes, for people.
        placement: Who saved it, with which sharding.
    """

    parent: int
    depth: int
    is_last: bool
    is_leaf: bool
    name: str
    description: str
    nbytes: int = 0
    leaves: int = 0
    number: int = -1
    guide: str = ""
    size: str = ""
    placement: str = ""


def _array_bytes(tree: StoredTree) -> list[int]:
    # By number.
    return [_nbytes(array) for array in tree.arrays]


def _nbytes(array: StoredArray) -> int:
    form = dtypes.of_stored(array)
    return math.prod((*array.shape, *form.host_trailing)) * form.host.itemsize


def _made_by(array: StoredArray) -> str:
    names = {"scalar": "NumPy scalar", "jax": "JAX", "numpy": "NumPy", "python": "Python number"}
    return names.get(array.framework, array.framework)


def _value_text(value: Scalar) -> str:
    # Python refuses to write very long integers in decimal.
    return hex(value) if isinstance(value, int) and value.bit_length() > 4096 else repr(value)


def _rows(tree: StoredTree, most_depth: int | None) -> Iterator[Row]:
    rows = _nodes(tree)
    for row in reversed(rows):
        if row.parent >= 0:
            rows[row.parent].nbytes += row.nbytes
            rows[row.parent].leaves += row.leaves
    continued: list[str] = []  # for each level above the row, the line down to its next sibling
    for row in rows:
        if most_depth is not None and row.depth > most_depth:
            continue
        del continued[max(0, row.depth - 1) :]
        if row.depth:
            row.guide = "".join(continued) + ("└─ " if row.is_last else "├─ ")
            continued.append("   " if row.is_last else "│  ")
        if not row.is_leaf:
            row.description += f" of {formatting.count(row.leaves, 'leaf', 'leaves')}"
        row.size = formatting.size(row.nbytes) if row.nbytes or not row.is_leaf else row.size
        yield row


def _nodes(tree: StoredTree) -> list[Row]:
    """The rows of all nodes, in preorder, without what depends on other rows."""
    rows: list[Row] = []
    sizes = _array_bytes(tree)
    leaves = iter(enumerate(tree.leaves))
    pending: list[tuple[int, list[Key]]] = []  # containers that lack children: their row, keys last first
    for node in tree.structure.nodes:
        while pending and not pending[-1][1]:
            pending.pop()
        parent, keys = pending[-1] if pending else (-1, [])
        name = _key_text(keys.pop()) if keys else "(root)"
        row = Row(parent, len(pending), not keys, node.kind in ("leaf", "none"), name, node.tag or node.kind)
        if node.kind == "leaf":
            row.number, leaf = next(leaves)
            _describe_leaf(row, tree, leaf, sizes)
        elif node.kind == "none":
            row.description = "None"
        rows.append(row)
        if node.count:
            pending.append((len(rows) - 1, list(reversed(node.child_keys()))))
    return rows


def _describe_leaf(row: Row, tree: StoredTree, leaf: ArrayLeaf | Scalar, sizes: list[int]) -> None:
    row.leaves = 1
    if not isinstance(leaf, ArrayLeaf):
        row.description = f"{type(leaf).__name__} {_short(_value_text(leaf))}"
        return
    stored = tree.arrays[leaf.array]
    row.nbytes = sizes[leaf.array]
    row.size = formatting.size(row.nbytes)
    if stored.framework in ("str", "bytes"):
        row.description = f"{stored.framework} of {formatting.size(row.nbytes)}"
    else:
        row.description = f"{stored.dtype}{formatting.shape(stored.shape)}"
        row.placement = f"{_made_by(stored)} {sharding_text(stored.sharding)}".rstrip()


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _key_text(key: Key) -> str:
    """The key as it stands in a tree: plain where it is a plain string, else as code would have it."""
    if isinstance(key, DictKey):
        is_plain = isinstance(key.key, str) and key.key.isprintable() and key.key == key.key.strip() != ""
        return str(key.key) if is_plain and str(key.key)[0] not in ".[<'\"" else repr(key.key)
    return str(key)


# ---- shardings ---------------------------------------------------------------------------------
# Shardings as people read them, from the descriptions that checkpoints hold.


def sharding_text(description: dict[str, Any] | None) -> str:
    """`P('data', None) of data=2, model=4 (8 cpu)` and the like; empty where nothing was said.

    Descriptions come from files: whatever they hold, some text comes back.
    """
    if not description:
        return ""
    try:
        return _text(description)
    except (KeyError, TypeError, ValueError):
        return _short(str(description))


def _text(description: dict[str, Any]) -> str:
    kind = description["kind"]
    if kind == "single":
        return f"on {description['platform']}:{description['device']}"
    if kind == "named":
        mesh = description["mesh"]
        axes = ", ".join(f"{name}={size}" for name, size in mesh["axes"])
        devices = f"{len(mesh['devices'])} {mesh['platform']}"
        return f"P({', '.join(map(_axis, description['spec']))}) of {axes} ({devices})"
    if kind == "dtensor":
        mesh = description["mesh"]
        names = mesh["axis_names"] or [f"axis {number}" for number in range(len(mesh["shape"]))]
        axes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh["shape"], strict=True))
        parts = ", ".join(_placement(*placement) for placement in description["placements"])
        return f"[{parts}] of {axes} ({len(mesh['ranks'])} {mesh['device_type']})"
    return _short(str(description.get("text", kind)))


def _placement(name: str, *numbers: int) -> str:
    """A placement as torch spells it."""
    spelled = "".join(word.capitalize() for word in name.split("_"))
    return f"{spelled}({', '.join(map(str, numbers))})" if numbers else spelled


def _axis(part: Any) -> str:
    """One entry of a partition spec, as Python would write it."""
    return repr(tuple(part)) if isinstance(part, list) else repr(part)
