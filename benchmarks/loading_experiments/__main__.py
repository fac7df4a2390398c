"""`python -m benchmarks.loading_experiments`: tables, targets, the JSON, and pictures."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.command import add_common_arguments, results_path, wide_console
from benchmarks.distributed.session import Case, Results
from benchmarks.loading_experiments import (
    beside_copies,
    programs,
    scaling,
    scaling_chart,
    series,
    series_chart,
)
from benchmarks.loading_experiments.report import EXPERIMENTS, evaluate, show
from benchmarks.loading_experiments.session import Session
from benchmarks.session import SCHEMA, build_ring_program, default_directory
from benchmarks.targets import as_json


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = json.loads(arguments.report.read_text())
    else:
        if scaling.NAME in arguments.experiments and (reason := build_ring_program()):
            console.print(f"[yellow]The limit is measured without io_uring: {reason}[/]")
        document = measure(arguments, console)
    show(document, console)
    if arguments.charts is not None:
        for name in draw(document, arguments.charts):
            console.print(f"chart: {arguments.charts / name}")


def draw(document: dict[str, Any], directory: Path) -> list[str]:
    """Draws what the document holds; returns the names of the files."""
    present = {run["experiment"] for run in document["runs"]}
    charts = {
        "loading-series.svg": (series_chart.draw, {series.NAME}),
        "loading-scaling.svg": (scaling_chart.draw, {scaling.NAME, beside_copies.NAME}),
    }
    drawn = [name for name, (_, needed) in charts.items() if needed & present]
    for name in drawn:
        charts[name][0](document, directory / name)
    return drawn


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading_experiments", description=__doc__)
    names = list(EXPERIMENTS)
    parser.add_argument("--experiments", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, help="of every experiment (default: 3, with --quick 1)")
    parser.add_argument("--charts", type=Path, help="draw what was measured into this directory")
    add_common_arguments(parser, timeout_s=300.0, timed="one program")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs the experiments with a progress bar; returns the document, which is also kept."""
    programs.prepare_server()
    directory = arguments.directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.describe(directory),
        "quick": arguments.quick,
        "runs": [],
    }
    chosen = [EXPERIMENTS[name] for name in arguments.experiments]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn only between runs: on few cores a busy progress bar would be part of the measurement.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=sum(module.count(rounds) for module in chosen))

        def on_run(case: Case, outcome: dict[str, Any]) -> None:
            shown = f"{outcome['seconds']:.3f} s" if outcome["status"] == "ok" else outcome["status"]
            console.print(f"{case}: {shown}", highlight=False)
            progress.update(task, advance=1, refresh=True)

        session = Session(
            directory=directory / "work",
            results=results_path("loading-experiments", quick=arguments.quick),
            document=document,
            quick=arguments.quick,
            timeout_s=arguments.timeout,
            on_run=on_run,
        )
        # A session that is told to stop takes its programs along, and its gigabytes, some of them in memory.
        previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            for repetition in range(rounds):
                for module in chosen:
                    module.measure(session, repetition)
        finally:
            signal.signal(signal.SIGTERM, previous)
            session.remove()
            if arguments.directory is None:
                directory.rmdir()
            document["targets"] = as_json(evaluate(Results(document)))
            session.write()
    console.print(f"results: {session.results}")
    return document


if __name__ == "__main__":
    main()
