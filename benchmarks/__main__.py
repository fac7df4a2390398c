"""`python -m benchmarks`: measures, prints the tables and the targets, keeps the JSON, draws the chart."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.chart import draw
from benchmarks.plan import DEFAULT_STATES, Case, Selection, all_cases
from benchmarks.report import show
from benchmarks.session import ROOT, SCHEMA, Session, build_ring_program, default_directory
from benchmarks.states import STATES
from benchmarks.systems import SYSTEMS, USUAL_SYSTEMS
from benchmarks.worker import OPERATIONS

RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = json.loads(arguments.report.read_text())
    else:
        selection = Selection(arguments.states, arguments.systems, arguments.operations)
        if "limit" in arguments.systems and (reason := build_ring_program()):
            console.print(f"[yellow]The limit is measured without io_uring: {reason}[/]")
        repetitions = arguments.repetitions or (2 if arguments.quick else 5)
        document = measure(selection, repetitions, arguments, RESULTS, "all", console)
    show(document, console)
    for path in arguments.chart:
        draw(document, path)
        console.print(f"chart: {path}")


def wide_console() -> Console:
    """A console on which the tables fit, also where the output is a file."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--states", nargs="+", choices=STATES, default=DEFAULT_STATES, metavar="STATE")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=USUAL_SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="NAME")
    parser.add_argument("--repetitions", type=int, help="rounds (default: 5, with --quick 2)")
    parser.add_argument("--quick", action="store_true", help="small states: does everything work?")
    parser.add_argument("--directory", type=Path, help="where checkpoints go (default: beside results)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run (default: 900)")
    parser.add_argument("--resume", type=Path, help="go on with an unfinished results file")
    parser.add_argument("--report", type=Path, help="measure nothing; show this results file")
    parser.add_argument(
        "--chart", type=Path, nargs="+", default=[], help="draw the figures (.svg or .png), for the README"
    )
    arguments = parser.parse_args()
    if arguments.repetitions is not None and arguments.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return arguments


def measure(
    selection: Selection,
    repetitions: int,
    arguments: argparse.Namespace,
    parent: Path,
    label: str,
    console: Console,
) -> dict[str, Any]:
    """Runs a session with a progress bar; returns the document, which is also kept under `parent`."""
    directory = arguments.directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    results, document = _document(arguments, directory, parent, label)
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
            on_run=on_run,
        )
        try:
            session.run()
        finally:
            if arguments.directory is None:
                directory.rmdir()
    console.print(f"results: {results}")
    return document


def _document(
    arguments: argparse.Namespace, directory: Path, parent: Path, label: str
) -> tuple[Path, dict[str, Any]]:
    """The results file: the one to go on with, or a new one."""
    if arguments.resume is not None:
        document = json.loads(arguments.resume.read_text())
        document["runs"] = [run for run in document["runs"] if run["status"] == "ok"]
        return arguments.resume, document
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S") + f"-{label}" + ("-quick" if arguments.quick else "")
    document = {
        "schema": SCHEMA,
        "machine": machine.describe(directory),
        "quick": arguments.quick,
        "runs": [],
    }
    return parent / f"{name}.json", document


if __name__ == "__main__":
    main()
