"""Unfinished saves and exports as `ls` and `gc` show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waystation.checkpoint.collect import FoundLeftover
from waystation.cli import formatting
from waystation.cli.output import Output

_KINDS = {"save": "", "overwrite": "data inside of it: ", "export": "an export: "}
_VERDICTS = {
    "dead": "its process is gone",
    "abandoned": "of another machine, silent for long",
    "running": "its process runs",
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
