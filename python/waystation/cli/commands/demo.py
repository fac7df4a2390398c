"""`waystation demo`: the demonstration."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from waystation import storage
from waystation.cli.output import Output
from waystation.errors import InvalidInput
from waystation_demo import DemoFailed, memory_tier
from waystation_demo import run as run_demo
from waystation_demo import runtime as runtime_demo

FAILED_CLAIM = 1


def run(output: Output, output_path: Path, *, memory: bool, runtime: bool, quick: bool) -> None:
    """Runs it, or that of the memory tier or the runtime; exits with 1 if a claim does not hold."""
    if memory and runtime:
        raise InvalidInput("give only one of --memory and --runtime: each is a demonstration of its own")
    if storage.is_there(output_path) and not storage.is_directory(output_path):
        raise InvalidInput(f"'{output_path}' is a file; give a directory with --output, or leave it out")
    console = Console(quiet=True) if output.as_json else output.console
    tell = memory_tier.run if memory else runtime_demo.run if runtime else run_demo
    try:
        report = tell(output_path.expanduser().absolute(), quick=quick, console=console)
    except DemoFailed as error:
        output.note(f"error: {error.message}", style="red")
        if output.as_json:
            told = {"kind": "DemoFailed", "message": error.message}
            output.document({"error": {**told, "context": {}, "hint": None}})
        raise typer.Exit(FAILED_CLAIM) from None
    if output.as_json:
        output.document(report)
