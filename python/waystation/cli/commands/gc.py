"""`waystation gc`: removes what killed saves and exports left behind."""

from __future__ import annotations

import sys

import typer

from waystation.checkpoint.collect import FoundLeftover, find_leftovers, remove_leftovers
from waystation.cli import formatting
from waystation.cli.commands.ls import attempt_document, show_attempts
from waystation.cli.output import Output
from waystation.errors import InvalidInput


def run(output: Output, directory: str, older_than: str, *, dry_run: bool, yes: bool) -> None:
    """Shows the attempts, asks, and removes those that may be removed."""
    older_than_s = formatting.parse_age(older_than)
    found = find_leftovers(directory, older_than_s=older_than_s)
    removable = [entry for entry in found if entry.removable]
    if not output.as_json:
        _show(output, found, removable)
    removed: list[FoundLeftover] = []
    if removable and not dry_run and _agreed(output, yes):
        removed = _remove(output, removable, older_than_s)
    if output.as_json:
        documents = [{**attempt_document(entry), "removed": entry in removed} for entry in found]
        output.document({"dry_run": dry_run, "attempts": documents, "bytes_removed": _bytes(removed)})
    elif removed:
        output.line(
            f"removed {formatting.count(len(removed), 'attempt')}, {formatting.size(_bytes(removed))}"
        )


def _show(output: Output, found: list[FoundLeftover], removable: list[FoundLeftover]) -> None:
    if not found:
        output.line("nothing to remove: no save or export was left unfinished")
        return
    show_attempts(output, found)
    undecided = sum(entry.verdict == "undecided" for entry in found)
    running = len(found) - len(removable) - undecided
    output.line(
        f"{formatting.count(len(removable), 'attempt')} can be removed, {formatting.size(_bytes(removable))}"
        + (f"; {running} may still be running" if running else "")
        + (f"; {undecided} may belong to a checkpoint" if undecided else "")
    )


def _agreed(output: Output, yes: bool) -> bool:
    if yes:
        return True
    if output.as_json or not sys.stdin.isatty():
        raise InvalidInput(
            "the command asks before it removes anything, and cannot ask here; give --yes to remove what it "
            "finds, or --dry-run to only see that"
        )
    return typer.confirm("Remove them?")


def _remove(output: Output, removable: list[FoundLeftover], older_than_s: float) -> list[FoundLeftover]:
    total = _bytes(removable)
    done = 0
    with output.progress("removing") as on_progress:

        def advance(entry: FoundLeftover) -> None:
            nonlocal done
            done += entry.nbytes
            on_progress(done, total)

        return remove_leftovers(removable, older_than_s=older_than_s, on_removed=advance)


def _bytes(entries: list[FoundLeftover]) -> int:
    return sum(entry.nbytes for entry in entries)
