"""`waystation launch`: shows what the launcher (`waystation_launch`) does."""

from __future__ import annotations

import sys

import typer

from waystation.cli.output import Output
from waystation_launch.launch import Request
from waystation_launch.launch import run as run_launch


def run(output: Output, request: Request) -> None:
    """Runs the command, shows what its processes write, and reports how they ended."""

    def show(is_error: bool, line: str) -> None:
        # Where a document is wanted, stdout is for that alone.
        stream = sys.stderr if is_error or output.as_json else sys.stdout
        stream.write(f"{line}\n")
        stream.flush()

    result = run_launch(request, output.note, show)
    if output.as_json:
        output.document(result.document)
    if result.exit_code:
        raise typer.Exit(result.exit_code)
