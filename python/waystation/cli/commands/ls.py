"""`waystation ls`: the checkpoints of a directory, the saves and exports there that did not end, and
directories of checkpoints in it, such as the runs in a bucket.
"""

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
from waystation.errors import InvalidInput, PermissionDenied, WaystationError
from waystation.layouts.native import names
from waystation.layouts.native.read import array_count, open_checkpoint
from waystation.layouts.orbax.names import is_temporary

FOUND_DAMAGE = 1

# Into so many directories it is looked whether they hold checkpoints, and there at so many, the last ones: in
# a store each look is a request.
_MOST_LOOKED_INTO = 100
_LAST_LOOKED_AT = 3
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class Found:
    """What the directories in a directory are.

    Attributes:
        own: Paths of checkpoints in the native layout, also of those that have lost their record.
        orbax: Paths of those in Orbax's layouts.
        closed: Paths of those that this process must not look into, each with the error of the system: they
            may be checkpoints, or not (`lost+found`).
        others: Paths of those that are no checkpoints, and no remains of saves.
    """

    own: list[str]
    orbax: list[str]
    closed: list[tuple[str, PermissionDenied]]
    others: list[str]


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory beside the checkpoints.

    Attributes:
        path: Where it is.
        holds_checkpoints: Whether the last ones in it are checkpoints; None if nobody has looked.
    """

    path: str
    holds_checkpoints: bool | None


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
    is_damaged: bool = False

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
    found = checkpoints_in(parent)
    entries = _entries(output, found.own)
    begun = {
        os.path.dirname(each.leftover.path) for each in leftovers
    }  # in a store they are in their targets
    directories = directories_beside(parent, [path for path in found.others if path not in begun])
    if output.as_json:
        output.document(_document(parent, entries, found, leftovers, directories))
    else:
        _show(output, parent, entries, found, leftovers, directories)
    if any(entry.is_damaged for entry in entries):
        raise typer.Exit(FOUND_DAMAGE)


def checkpoints_in(parent: str) -> Found:
    """The checkpoints in a directory; those that end in numbers in the order of these."""
    paths = [os.path.join(parent, name) for name in sorted(storage.directories(parent), key=natural_order)]
    layouts = list(zip(paths, storage.side_by_side(parent, _layout_of, paths), strict=True))
    return Found(
        [path for path, layout in layouts if layout == "native"],
        [path for path, layout in layouts if layout == "orbax"],
        [(path, layout) for path, layout in layouts if isinstance(layout, PermissionDenied)],
        [path for path, layout in layouts if layout is None and not _is_hidden(os.path.basename(path))],
    )


def _is_hidden(name: str) -> bool:
    """Whether a name is that of what saves and readers have there for a while, or begins with a dot."""
    is_attempt = storage.names.attempt_target(name) is not None or is_temporary(name)
    return name.startswith(".") or is_attempt or names.is_aside(name) or names.is_passing(name)


def directories_beside(parent: str, paths: list[str]) -> list[Directory]:
    """The directories beside the checkpoints, and which of them hold some."""
    held = storage.side_by_side(parent, _holds_checkpoints, paths[:_MOST_LOOKED_INTO])
    return [Directory(path, holds) for path, holds in itertools.zip_longest(paths, held)]


def _holds_checkpoints(directory: str) -> bool:
    """Whether any of the last directories in a directory is a checkpoint."""
    try:
        inside = [name for name in storage.directories(directory) if not _is_hidden(name)]
        last = sorted(inside, key=natural_order)[: -_LAST_LOOKED_AT - 1 : -1]
        return any(_layout_of(os.path.join(directory, name)) in ("native", "orbax") for name in last)
    except PermissionDenied:
        return False


def _layout_of(path: str) -> str | PermissionDenied | None:
    """The layout of a checkpoint, of one that has lost its record as well; or why it cannot be told."""
    try:
        if storage.is_in_store(path):
            return _layout_in_store(path)
        return layout_at(path) or ("native" if lost_record(path) else None)
    except PermissionDenied as error:
        return error


def _layout_in_store(path: str) -> str | None:
    """The same by one request, as there may be many; to ask for what is not there takes several."""
    found = {entry.name for entry in storage.entries_or_none(path)}
    if names.RECORD in found and storage.names.attempt_target(os.path.basename(path)) is None:
        return "native"
    return layout_at(path) if storage.names.COMMIT_OF_ORBAX in found else None


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
        is_damaged = not isinstance(error, PermissionDenied)
        problem = formatting.without_number(error.message)
        return _Entry(path, nbytes, problem=problem, is_damaged=is_damaged)
    took_s = None if record.begun_ns is None else (record.created_ns - record.begun_ns) / 1e9
    return _Entry(path, nbytes, arrays, record.created_ns, record.generation, took_s)


def _document(
    parent: str,
    entries: list[_Entry],
    found: Found,
    leftovers: list[FoundLeftover],
    directories: list[Directory],
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
        "orbax_checkpoints": found.orbax,
        "unreadable": [
            {"path": path, "problem": formatting.without_number(error.message)}
            for path, error in found.closed
        ],
        "attempts": [attempt_document(leftover) for leftover in leftovers],
        "directories": [
            {"path": each.path, "holds_checkpoints": each.holds_checkpoints} for each in directories
        ],
    }


def _show(
    output: Output,
    parent: str,
    entries: list[_Entry],
    found: Found,
    leftovers: list[FoundLeftover],
    directories: list[Directory],
) -> None:
    if entries:
        _show_entries(output, entries)
    elif not found.orbax:
        output.line(f"no checkpoints in {parent}")
    if found.orbax:
        listed = ", ".join(os.path.basename(path) for path in found.orbax)
        output.line(formatting.plain(f"in Orbax's layout, which can be loaded and exported: {listed}"))
    _show_directories(output, directories, is_empty=not entries and not found.orbax)
    if found.closed:
        output.line()
        output.line("directories that this user cannot read; they may be checkpoints:", style="yellow")
    for path, error in found.closed:
        output.line(f"  {path}: {formatting.without_number(error.message)}", style="yellow")
    if leftovers:
        output.line()
        output.line("saves and exports that did not end:", style="yellow")
        show_attempts(output, leftovers)


def _show_directories(output: Output, directories: list[Directory], *, is_empty: bool) -> None:
    """Names directories that hold checkpoints; where nothing else is found, also others, by which one finds
    one's way."""
    runs = [each.path for each in directories if each.holds_checkpoints]
    others = [each.path for each in directories if not each.holds_checkpoints]
    if runs:
        if not is_empty:
            output.line()
        output.line(f"directories that hold checkpoints: {named(runs)}")
    elif others and is_empty:
        output.line(f"directories there: {named(others)}")


def named(paths: list[str]) -> str:
    """The names of the first of some paths, and how many more there are."""
    more = len(paths) - _MOST_NAMED
    listed = ", ".join(os.path.basename(path) for path in paths[:_MOST_NAMED])
    return formatting.plain(listed + (f" and {more} more" if more > 0 else ""))


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
            cells = [step, "", size, "damaged" if entry.is_damaged else "unreadable", ""]
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
