"""`python -m benchmarks.loading_experiments`: tables, targets, the JSON, and pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import command
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
from benchmarks.rounds import Document, Results


def main() -> None:
    arguments = _parse()
    console = command.wide_console()
    document = command.document_of(arguments, lambda: measure(arguments, console))
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
    parser = command.experiments_parser(
        "benchmarks.loading_experiments", __doc__, EXPERIMENTS, timeout_s=300.0, timed="one program"
    )
    parser.add_argument("--charts", type=Path, help="draw what was measured into this directory")
    return command.parsed(parser, rounds=(3, 1))


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Runs the experiments, round after round; returns the document, which is also kept."""
    if scaling.NAME in arguments.experiments:
        command.say_without_ring(console)
    programs.prepare_server()
    chosen = [EXPERIMENTS[name] for name in arguments.experiments]
    with command.measuring(
        arguments,
        "loading-experiments",
        console,
        Session,
        lambda _: sum(module.count(arguments.rounds) for module in chosen),
        lambda document: evaluate(Results(document)),
    ) as session:
        for repetition in range(arguments.rounds):
            for module in chosen:
                module.measure(session, repetition)
    return session.document


if __name__ == "__main__":
    main()
