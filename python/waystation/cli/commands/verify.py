"""`waystation verify`: reads checkpoints whole and shows all damage."""

from __future__ import annotations

import os
from typing import Any

import typer

from waystation import storage
from waystation.checkpoint.collect import entries_of
from waystation.checkpoint.paths import is_checkpoint, lost_record
from waystation.checkpoint.verify import Damage, Verification, verify
from waystation.cli import formatting
from waystation.cli.commands.ls import checkpoints_in, directories_beside, named
from waystation.cli.output import Output
from waystation.errors import InvalidInput, NotFound
from waystation.layouts.native import names
from waystation.layouts.orbax.checkpoint import had_checksums

FOUND_DAMAGE = 1


def run(output: Output, path: str, *, every: bool) -> None:
    """Verifies, prints what was found, and exits with 1 if anything is damaged."""
    found = []
    targets, others = _targets(path) if every else ([path], [])
    for target in targets:
        with output.progress(f"verifying {os.path.basename(target)}") as on_progress:
            if every and lost_record(target):
                missing = Damage(os.path.join(target, names.RECORD), "a committed file is missing", ())
                outcome = Verification(target, [missing])
            else:
                outcome = verify(target, on_progress=on_progress)
        found.append(outcome)
        if not output.as_json:
            _show(output, outcome)
    if output.as_json:
        documents = [_document(outcome) for outcome in found]
        output.document({"checkpoints": documents, "not_verified": others})
    for other in [] if output.as_json else others:
        output.line(f"{other}: not verified: Orbax has written it, without checksums of data", style="yellow")
    if any(outcome.damages for outcome in found):
        raise typer.Exit(FOUND_DAMAGE)


def _targets(directory: str) -> tuple[list[str], list[str]]:
    """The checkpoints in a directory, and those that cannot be verified: they have no checksums."""
    parent = storage.resolved(storage.located(directory))
    if os.path.basename(parent) and is_checkpoint(parent):
        raise InvalidInput(f"'{parent}' is a checkpoint itself; leave --all out to verify it")
    if not entries_of(parent):
        raise NotFound(f"there are no checkpoints in '{parent}'", path=parent)
    found = checkpoints_in(parent)
    for _, error in found.closed:  # it may be a checkpoint, which would not be verified
        raise error
    if not found.own and not found.orbax:
        runs = [each.path for each in directories_beside(parent, found.others) if each.holds_checkpoints]
        hint = f"; directories there that hold some: {named(runs)}" if runs else ""
        raise NotFound(f"there are no checkpoints in '{parent}'{hint}", path=parent)
    summed = [other for other in found.orbax if had_checksums(other)]
    return found.own + summed, [other for other in found.orbax if other not in summed]


def _document(outcome: Verification) -> dict[str, Any]:
    return {
        "path": outcome.path,
        "intact": not outcome.damages,
        "files": outcome.files,
        "bytes_read": outcome.bytes_read,
        "damages": [
            {"path": damage.path, "problem": damage.problem, "arrays": list(damage.arrays)}
            for damage in outcome.damages
        ],
        "strays": outcome.strays,
        "local": None if outcome.local is None else outcome.local.to_json(),
    }


def _show(output: Output, outcome: Verification) -> None:
    read = f"{formatting.size(outcome.bytes_read)} in {formatting.count(outcome.files, 'file')}"
    if outcome.damages:
        damages = formatting.count(len(outcome.damages), "damage")
        output.line(f"{outcome.path}: {damages} ({read} read)", style="bold red")
        _show_damages(output, outcome)
    else:
        output.line(f"{outcome.path}: intact ({read} verified)")
    if outcome.local is not None:
        output.line(f"  {formatting.part(outcome.local)}; only this part was verified")
    for stray in outcome.strays:
        output.line(f"  not its own: {os.path.relpath(stray, outcome.path)}", style="yellow")


def _show_damages(output: Output, outcome: Verification) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=True, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("  file", no_wrap=True)
    table.add_column("problem", overflow="fold")
    table.add_column("arrays", overflow="fold")
    for damage in outcome.damages:
        cells = ("  " + os.path.relpath(damage.path, outcome.path), damage.problem, _arrays(damage))
        table.add_row(*(Text(formatting.plain(cell)) for cell in cells))
    output.show(table)


def _arrays(damage: Damage, limit: int = 5) -> str:
    more = len(damage.arrays) - limit
    return ", ".join(damage.arrays[:limit]) + (f" and {more} more" if more > 0 else "")
