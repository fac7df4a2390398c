"""`waystation inspect`: the tree of a checkpoint, from its metadata alone; imports no framework."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waystation.checkpoint.paths import require_checkpoint, resolve
from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.cli.sharding_text import sharding_text
from waystation.frameworks.base import StoredArray
from waystation.layouts.native import names
from waystation.layouts.native.handler_files import HandlerFiles
from waystation.layouts.native.open import open_any
from waystation.layouts.native.read import OpenCheckpointable, open_checkpoint
from waystation.layouts.native.records import CheckpointRecord
from waystation.layouts.native.tree_file import ArrayLeaf, Scalar
from waystation.tree import DictKey, Key, format_key_path

_SHOWN_CHARACTERS = 60

Opened = OpenCheckpointable | HandlerFiles


def run(output: Output, path: Path, checkpointable: str | None, depth: int | None) -> None:
    """Prints what a checkpoint holds."""
    target = resolve(path)
    require_checkpoint(target)
    record = open_checkpoint(target)
    chosen = sorted(record.checkpointables) if checkpointable is None else [checkpointable]
    opened = {name: open_any(target, record, name) for name in chosen}
    if output.as_json:
        output.document(_document(target, record, opened))
    else:
        _show_checkpoint(output, target, record, opened)
        for name, entry in opened.items():
            if isinstance(entry, HandlerFiles):
                _show_files(output, name, entry)
            else:
                _show_checkpointable(output, name, entry, depth)


def array_bytes(opened: OpenCheckpointable) -> list[int]:
    """Bytes of each array, by its number."""
    item_bytes = (opened.tables.arrays["item_bits"] // 8).tolist()
    arrays = opened.tree.arrays
    return [math.prod(array.storage_shape) * size for array, size in zip(arrays, item_bytes, strict=True)]


# ---- for programs ------------------------------------------------------------------------------


def _document(target: str, record: CheckpointRecord, opened: dict[str, Opened]) -> dict[str, Any]:
    return {
        "path": target,
        "format_version": names.FORMAT_VERSION,
        "generation": record.generation,
        "committed_at": formatting.moment(record.created_ns),
        "custom_metadata": record.custom_metadata,
        "local": None if record.local is None else record.local.to_json(),
        "checkpointables": {name: _checkpointable_document(entry) for name, entry in opened.items()},
    }


def _checkpointable_document(opened: Opened) -> dict[str, Any]:
    if isinstance(opened, HandlerFiles):
        files = opened.record.files
        return {
            "handler": opened.record.handler,
            "processes": opened.record.process_count,
            "files": len(files),
            "file_bytes": sum(digest.nbytes for digest in files.values()),
            "paths": sorted(files),
        }
    sizes = array_bytes(opened)
    tree = opened.tree
    leaves = [
        {"path": format_key_path(path), **_leaf_document(opened, leaf, sizes)}
        for path, leaf in zip(tree.structure.key_paths(), tree.leaves, strict=True)
    ]
    return {
        "processes": opened.record.process_count,
        "arrays": len(tree.arrays),
        "array_bytes": sum(sizes),
        "files": len(opened.tables.files),
        "file_bytes": int(opened.tables.files["file_bytes"].sum()),
        "leaves": leaves,
    }


def _leaf_document(opened: OpenCheckpointable, leaf: ArrayLeaf | Scalar, sizes: list[int]) -> dict[str, Any]:
    if not isinstance(leaf, ArrayLeaf):
        is_json = isinstance(leaf, bool | float | str) or (isinstance(leaf, int) and leaf.bit_length() <= 64)
        return {"kind": type(leaf).__name__, "value": leaf if is_json else _value_text(leaf)}
    stored = opened.tree.arrays[leaf.array]
    return {
        "kind": "array",
        "name": opened.tree.labels[leaf.array],
        "shape": list(stored.shape),
        "dtype": stored.dtype,
        "framework": stored.framework,
        "sharding": stored.sharding,
        "chunks": opened.tables.chunk_count(leaf.array),
        "bytes": sizes[leaf.array],
    }


def _value_text(value: Scalar) -> str:
    # Python refuses to write very long integers in decimal.
    return hex(value) if isinstance(value, int) and value.bit_length() > 4096 else repr(value)


# ---- for people --------------------------------------------------------------------------------


def _show_checkpoint(
    output: Output, target: str, record: CheckpointRecord, opened: dict[str, Opened]
) -> None:
    output.line(target, style="bold")
    facts = {
        "committed": formatting.shown_moment(record.created_ns),
        "generation": str(record.generation),
        "format": f"native, version {names.FORMAT_VERSION}",
    }
    if record.local is not None:
        facts["local storage"] = formatting.part(record.local)
    if record.custom_metadata is not None:
        facts["custom metadata"] = json.dumps(record.custom_metadata)
    absent = sorted(record.checkpointables.keys() - opened.keys())
    if absent:
        facts["not shown"] = ", ".join(absent)
    width = max(map(len, facts))
    for name, fact in facts.items():
        output.line(f"  {name:<{width}}  {fact}")


def _show_checkpointable(output: Output, name: str, opened: OpenCheckpointable, depth: int | None) -> None:
    from rich.table import Table
    from rich.text import Text

    output.line()
    output.line(f"{name}: {_totals(opened)}", style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(opened, depth):
        cells = (row.guide + row.name, row.description, row.size, row.placement)
        table.add_row(*(Text(formatting.plain(cell)) for cell in cells), style=None if row.is_leaf else "dim")
    output.show(table)


def _show_files(output: Output, name: str, opened: HandlerFiles) -> None:
    from rich.table import Table
    from rich.text import Text

    files = opened.record.files
    total = formatting.size(sum(digest.nbytes for digest in files.values()))
    output.line()
    output.line(f"{name}: {total} in {formatting.count(len(files), 'file')}", style="bold")
    output.line(f"  saved by {formatting.plain(opened.record.handler or '')}", style="dim")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    for path, digest in sorted(files.items()):
        table.add_row(Text(f"  {formatting.plain(path)}"), Text(formatting.size(digest.nbytes)))
    output.show(table)


def _totals(opened: OpenCheckpointable) -> str:
    tree, files = opened.tree, opened.tables.files
    by_framework = Counter(_made_by(array) for array in tree.arrays)
    made_by = ", ".join(f"{number} {name}" for name, number in sorted(by_framework.items()))
    others = len(tree.leaves) - len(tree.arrays)
    parts = [formatting.count(len(tree.arrays), "array") + (f" ({made_by})" if made_by else "")]
    if others:
        parts.append(formatting.count(others, "other value"))
    parts.append(formatting.size(sum(array_bytes(opened))))
    held = "in " + formatting.count(len(files), "file")
    if opened.record.process_count > 1:
        held += f" of {opened.record.process_count} processes"
    return f"{', '.join(parts)} {held}"


def _made_by(array: StoredArray) -> str:
    return {"scalar": "NumPy scalar", "jax": "JAX", "torch": "torch", "numpy": "NumPy"}.get(
        array.framework, array.framework
    )


@dataclass(slots=True)
class _Row:
    """One node of the tree, as a line."""

    parent: int
    depth: int
    is_last: bool
    is_leaf: bool
    name: str
    description: str
    nbytes: int = 0
    leaves: int = 0
    guide: str = ""
    size: str = ""
    placement: str = ""


def _rows(opened: OpenCheckpointable, most_depth: int | None) -> Iterator[_Row]:
    rows = _nodes(opened)
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


def _nodes(opened: OpenCheckpointable) -> list[_Row]:
    """The rows of all nodes, in preorder, without what depends on other rows."""
    rows: list[_Row] = []
    sizes = array_bytes(opened)
    leaves = iter(opened.tree.leaves)
    pending: list[tuple[int, list[Key]]] = []  # containers that lack children: their row, keys last first
    for node in opened.tree.structure.nodes:
        while pending and not pending[-1][1]:
            pending.pop()
        parent, keys = pending[-1] if pending else (-1, [])
        name = _key_text(keys.pop()) if keys else "(root)"
        row = _Row(parent, len(pending), not keys, node.kind in ("leaf", "none"), name, node.tag or node.kind)
        if node.kind == "leaf":
            _describe_leaf(row, opened, next(leaves), sizes)
        elif node.kind == "none":
            row.description = "None"
        rows.append(row)
        if node.count:
            pending.append((len(rows) - 1, list(reversed(node.child_keys()))))
    return rows


def _describe_leaf(row: _Row, opened: OpenCheckpointable, leaf: ArrayLeaf | Scalar, sizes: list[int]) -> None:
    row.leaves = 1
    if not isinstance(leaf, ArrayLeaf):
        row.description = f"{type(leaf).__name__} {_short(_value_text(leaf))}"
        return
    stored = opened.tree.arrays[leaf.array]
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
