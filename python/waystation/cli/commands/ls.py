"""`waystation ls`: the checkpoints of a directory, and the saves and exports there that did not end."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from waystation import storage
from waystation.checkpoint.collect import FoundLeftover, find_leftovers, tree_bytes
from waystation.checkpoint.paths import (
    is_checkpoint,
    layout_at,
    lost_record,
    natural_order,
    require_checkpoint,
)
from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.errors import InvalidInput, WaystationError
from waystation.layouts.native.read import array_count, open_checkpoint

FOUND_DAMAGE = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    """One checkpoint of the directory."""

    path: str
    nbytes: int
    arrays: int | None = None
    created_ns: int | None = None
    generation: int | None = None
    duration_s: float | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def step(self) -> int | None:
        found = re.search(r"(\d{1,18})$", self.name)
        return int(found.group(1)) if found else None


def run(output: Output, directory: str) -> None:
    """Prints the list."""
    parent = storage.resolved(storage.located(directory))
    if storage.is_directory(parent) and os.path.basename(parent) and is_checkpoint(parent):
        raise InvalidInput(f"'{parent}' is a checkpoint itself; 'waystation inspect {parent}' shows it")
    leftovers = find_leftovers(parent)
    own, others = checkpoints_in(parent)
    entries = _entries(output, own)
    if output.as_json:
        output.document(_document(parent, entries, others, leftovers))
    else:
        _show(output, parent, entries, others, leftovers)
    if any(entry.problem for entry in entries):
        raise typer.Exit(FOUND_DAMAGE)


def checkpoints_in(parent: str) -> tuple[list[str], list[str]]:
    """Paths of the checkpoints in a directory, also of those that have lost their record, and of those in
    Orbax's layouts; those that end in numbers in the order of these."""
    names = sorted(storage.directories(parent), key=natural_order)
    paths = [os.path.join(parent, name) for name in names]
    layouts = storage.side_by_side(parent, _layout_of, paths)
    own, others = (
        [path for path, found in zip(paths, layouts, strict=True) if found == layout]
        for layout in ("native", "orbax")
    )
    return own, others


def _layout_of(path: str) -> str | None:
    """The layout of a checkpoint, of one that has lost its record as well."""
    return layout_at(path) or ("native" if lost_record(path) else None)


def _entries(output: Output, paths: list[str]) -> list[_Entry]:
    done = itertools.count(1)
    with output.progress("reading records") as on_progress:

        def look_at(path: str) -> _Entry:
            entry = _look_at(path)
            on_progress(next(done), len(paths))
            return entry

        return storage.side_by_side(os.path.dirname(paths[0]) if paths else "", look_at, paths)


def _look_at(path: str) -> _Entry:
    nbytes = tree_bytes(path)
    try:
        require_checkpoint(path)
        record = open_checkpoint(path)
        arrays = sum(array_count(path, record, name) for name in record.checkpointables)
    except WaystationError as error:
        return _Entry(path, nbytes, problem=error.message)
    took_s = None if record.begun_ns is None else (record.created_ns - record.begun_ns) / 1e9
    return _Entry(path, nbytes, arrays, record.created_ns, record.generation, took_s)


def _document(
    parent: str, entries: list[_Entry], others: list[str], leftovers: list[FoundLeftover]
) -> dict[str, Any]:
    return {
        "directory": parent,
        "checkpoints": [
            {
                "name": entry.name,
                "path": entry.path,
                "step": entry.step,
                "bytes": entry.nbytes,
                "arrays": entry.arrays,
                "committed_at": None if entry.created_ns is None else formatting.moment(entry.created_ns),
                "generation": entry.generation,
                "duration_s": entry.duration_s,
                "problem": entry.problem,
            }
            for entry in entries
        ],
        "orbax_checkpoints": others,
        "attempts": [attempt_document(found) for found in leftovers],
    }


def _show(
    output: Output, parent: str, entries: list[_Entry], others: list[str], leftovers: list[FoundLeftover]
) -> None:
    if entries:
        _show_entries(output, entries)
    elif not others:
        output.line(f"no checkpoints in {parent}")
    if others:
        names = ", ".join(os.path.basename(path) for path in others)
        output.line(formatting.plain(f"in Orbax's layout, which can be loaded and exported: {names}"))
    if leftovers:
        output.line()
        output.line("saves and exports that did not end:", style="yellow")
        show_attempts(output, leftovers)


def _show_entries(output: Output, entries: list[_Entry]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("checkpoint", no_wrap=True)
    for heading in ("step", "arrays", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("committed", no_wrap=True)
    table.add_column("generation", justify="right")
    for entry in entries:
        step = "" if entry.step is None else str(entry.step)
        size = formatting.size(entry.nbytes)
        if entry.problem is None and entry.created_ns is not None:
            committed = formatting.shown_moment(entry.created_ns)
            cells = [step, str(entry.arrays), size, committed, str(entry.generation)]
        else:
            cells = [step, "", size, "damaged", ""]
        style = "red" if entry.problem else None
        table.add_row(*(Text(formatting.plain(cell)) for cell in [entry.name, *cells]), style=style)
    output.show(table)
    for entry in entries:
        if entry.problem:
            output.line(f"{entry.name}: {entry.problem}", style="red")


# ---- attempts ----------------------------------------------------------------------------------
# Unfinished saves and exports as `ls` and `gc` show them.


_KINDS = {"save": "", "overwrite": "data inside of it: ", "export": "an export: "}
_VERDICTS = {
    "dead": "its process is gone",
    "abandoned": "of another machine, silent for long",
    "running": "its process runs",
    "leased": "its lease has not run out, may be running",
    "unknown": "of another machine, may be running",
    "undecided": "prepared; its program will complete or remove it",
}


def attempt_document(found: FoundLeftover) -> dict[str, Any]:
    """An attempt for programs."""
    return {
        "path": found.leftover.path,
        "kind": found.leftover.kind,
        "checkpoint": None if found.leftover.kind == "export" else found.leftover.target,
        "verdict": found.verdict,
        "removable": found.removable,
        "bytes": found.nbytes,
        "silent_s": round(found.leftover.age_s, 3),
        "owner": found.leftover.owner,
    }


def show_attempts(output: Output, attempts: Sequence[FoundLeftover]) -> None:
    """Prints attempts as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("of", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("silent for", justify="right", no_wrap=True)
    table.add_column("state")
    for found in attempts:
        host = found.leftover.owner.get("host")
        process = found.leftover.owner.get("process")
        owner = f" (process {process} on {host})" if host is not None else ""
        cells = (
            found.leftover.target,
            formatting.size(found.nbytes),
            formatting.age(found.leftover.age_s),
            _KINDS[found.leftover.kind] + _VERDICTS[found.verdict] + owner,
        )
        table.add_row(*(Text(formatting.plain(cell)) for cell in cells))
    output.show(table)
