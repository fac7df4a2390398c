"""`python -m benchmarks.memory`: the memory tier against the disk; tables, targets, and the JSON.

Saves and recoveries of a transformer's state with Adam's moments, by other libraries and by Waystation, to
and from the disk, a slow store, and memory, of one host and of several that keep copies for each other; and
training with saves. Everything is measured in turns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.command import add_common_arguments, results_path, wide_console
from benchmarks.distributed.session import Case, Outcome, Results, Session
from benchmarks.memory import checkpoints, replication, training
from benchmarks.memory.report import show
from benchmarks.memory.targets import evaluate
from benchmarks.session import SCHEMA, default_directory
from benchmarks.targets import as_json

EXPERIMENTS = (checkpoints.NAME, replication.NAME, training.NAME)
FRAMEWORKS = tuple(checkpoints.OURS)


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = json.loads(arguments.report.read_text())
    else:
        document = _measure(arguments, console)
    show(document, console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, metavar="NAME")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, metavar="NAME")
    parser.add_argument(
        "--full", action="store_true", help="a state of 2.4 GB instead of 0.6, and steps of more than 1 s"
    )
    parser.add_argument(
        "--hosts", type=int, choices=replication.COUNTS, default=replication.HOSTS, help="of `replication`"
    )
    parser.add_argument("--rounds", type=int, help="of every experiment (default: 3, with --quick 1)")
    parser.add_argument("--iterations", type=int, help="of a training (default: 100, with --quick 4)")
    add_common_arguments(parser, timeout_s=1800.0, timed="one run")
    arguments = parser.parse_args()
    for name, usual, quick in (("rounds", 3, 1), ("iterations", 100, 4)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return arguments


def _measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs the experiments with a progress bar; returns the document, which is also kept."""
    directory = arguments.directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.describe(directory),
        "quick": arguments.quick,
        "full": arguments.full,
        "iterations": arguments.iterations,
        "runs": [],
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn only between runs: on few cores a busy progress bar would be part of the measurement.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=_count(arguments))

        def on_run(case: Case, outcome: Outcome) -> None:
            shown = f"{outcome['seconds']:.3f} s" if outcome["status"] == "ok" else outcome["status"]
            console.print(f"{case}: {shown}", highlight=False)
            progress.update(task, advance=1, refresh=True)

        session = Session(
            directory=directory / "work",
            results=results_path("memory", quick=arguments.quick),
            document=document,
            quick=arguments.quick,
            timeout_s=arguments.timeout,
            on_run=on_run,
        )
        # Whoever is told to end takes agents and their memory along.
        previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            _run(session, arguments)
        finally:
            signal.signal(signal.SIGTERM, previous)
            shutil.rmtree(session.directory, ignore_errors=True)
            if arguments.directory is None:
                directory.rmdir()
            document["targets"] = as_json(evaluate(Results(document)))
            session.write()
    console.print(f"results: {session.results}")
    return document


def _run(session: Session, arguments: argparse.Namespace) -> None:
    frameworks, rounds = arguments.frameworks, arguments.rounds
    state = "transformer" if arguments.full else "transformer-half-gb"
    if checkpoints.NAME in arguments.experiments:
        checkpoints.measure_rounds(session, state, frameworks, rounds)
    if replication.NAME in arguments.experiments:
        replication.measure_rounds(session, state, arguments.hosts, rounds)
    if training.NAME in arguments.experiments:
        size = "quick" if arguments.quick else "full" if arguments.full else "usual"
        training.measure_rounds(session, size, frameworks, rounds, arguments.iterations)


def _count(arguments: argparse.Namespace) -> int:
    """How many runs that are."""
    counts = {
        checkpoints.NAME: checkpoints.count(arguments.frameworks, arguments.rounds),
        replication.NAME: replication.count_runs(arguments.rounds),
        training.NAME: len(training.cases(arguments.frameworks)) * arguments.rounds,
    }
    return sum(counts[name] for name in arguments.experiments)


if __name__ == "__main__":
    main()
