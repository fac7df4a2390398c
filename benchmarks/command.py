"""What the benchmarks' commands share: their arguments, a session with a progress bar, its document."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.plan import Case, Selection, all_cases
from benchmarks.session import ROOT, SCHEMA, Session, build_ring_program, default_directory
from benchmarks.targets import NATIVE, Standard

RESULTS = ROOT / "benchmarks" / "results"


def wide_console() -> Console:
    """A console on which the tables fit, also where the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def results_path(label: str, *, quick: bool = False) -> Path:
    """Where the results of a session that begins now are kept."""
    started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return RESULTS / f"{started}-{label}{'-quick' if quick else ''}.json"


def add_common_arguments(parser: argparse.ArgumentParser, *, timeout_s: float, timed: str) -> None:
    """Adds what every command takes; `timed` is what the time limit is for."""
    parser.add_argument("--quick", action="store_true", help="small states: does everything work?")
    parser.add_argument("--directory", type=Path, help="where checkpoints go (default: beside results)")
    parser.add_argument(
        "--timeout", type=float, default=timeout_s, help=f"seconds for {timed} (default: {timeout_s:.0f})"
    )
    parser.add_argument("--report", type=Path, help="measure nothing; show this results file")


def session_parser(program: str, repetitions: int, description: str | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments of `measured`."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "--repetitions", type=_positive, help=f"rounds (default: {repetitions}, with --quick 2)"
    )
    parser.add_argument("--resume", type=Path, help="go on with an unfinished results file")
    parser.set_defaults(usual_repetitions=repetitions)
    add_common_arguments(parser, timeout_s=900.0, timed="one run")
    return parser


def add_charts_argument(parser: argparse.ArgumentParser) -> None:
    """Adds where figures go, if anywhere: a directory, since `make bench` gives it to two commands."""
    parser.add_argument(
        "--charts", type=Path, metavar="DIRECTORY", help="draw the figures into a directory (docs/images)"
    )


def measured(
    arguments: argparse.Namespace,
    selection: Selection,
    label: str,
    console: Console,
    standard: Standard = NATIVE,
) -> dict[str, Any]:
    """The document that the arguments ask for: of an earlier session, or of one that is run now.

    Where the limit is measured and its ring ways cannot be built, that is said.
    """
    if arguments.report is not None:
        earlier: dict[str, Any] = json.loads(arguments.report.read_text())
        return earlier
    if "limit" in selection.systems and (reason := build_ring_program()):
        console.print(f"[yellow]The limit is measured without io_uring: {reason}[/]")
    repetitions = arguments.repetitions or (2 if arguments.quick else arguments.usual_repetitions)
    return _measure(arguments, selection, repetitions, label, console, standard)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _measure(
    arguments: argparse.Namespace,
    selection: Selection,
    repetitions: int,
    label: str,
    console: Console,
    standard: Standard,
) -> dict[str, Any]:
    """Runs a session with a progress bar; returns the document, which is also kept as a file."""
    directory = arguments.directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    results, document = _document(arguments, directory, label)
    # Redrawn only between runs: on few cores a busy progress bar would be part of the measurement.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=len(all_cases(selection)) * repetitions)

        def on_run(case: Case, outcome: dict[str, Any]) -> None:
            shown = ", ".join(f"{name} {value:.3f} s" for name, value in outcome.get("seconds", {}).items())
            console.print(f"{case}: {shown or outcome['status']}", highlight=False)
            progress.update(task, advance=1, refresh=True)

        session = Session(
            selection=selection,
            directory=directory / "work",
            results=results,
            document=document,
            repetitions=repetitions,
            quick=document["quick"],
            timeout_s=arguments.timeout,
            standard=standard,
            on_run=on_run,
        )
        try:
            session.run()
        finally:
            if arguments.directory is None:
                directory.rmdir()
    console.print(f"results: {results}")
    return document


def _document(arguments: argparse.Namespace, directory: Path, label: str) -> tuple[Path, dict[str, Any]]:
    """The results file: the one to go on with, or a new one."""
    if arguments.resume is not None:
        document = json.loads(arguments.resume.read_text())
        document["runs"] = [run for run in document["runs"] if run["status"] == "ok"]
        return arguments.resume, document
    document = {
        "schema": SCHEMA,
        "machine": machine.describe(directory),
        "quick": arguments.quick,
        "runs": [],
    }
    return results_path(label, quick=arguments.quick), document
