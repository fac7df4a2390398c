"""`python -m benchmarks.distributed`: programs of several processes; tables, targets, and the JSON."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.command import add_common_arguments, results_path, wide_console
from benchmarks.distributed import disk, reshard
from benchmarks.distributed.models import TOPOLOGIES
from benchmarks.distributed.report import EXPERIMENTS, evaluate, show
from benchmarks.distributed.session import Case, Results, Session
from benchmarks.distributed.systems import LIBRARIES
from benchmarks.session import SCHEMA, build_ring_program, default_directory
from benchmarks.targets import as_json


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = json.loads(arguments.report.read_text())
    else:
        if {disk.NAME, reshard.NAME} & set(arguments.experiments) and (reason := build_ring_program()):
            console.print(f"[yellow]The limit is measured without io_uring: {reason}[/]")
        document = measure(arguments, console)
    show(document, console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__)
    names = list(EXPERIMENTS)
    parser.add_argument("--experiments", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES), help="of `reshard`, by name"
    )
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES, metavar="NAME", help="of `reshard`"
    )
    parser.add_argument("--rounds", type=int, help="of every experiment (default: 3, with --quick 1)")
    add_common_arguments(parser, timeout_s=600.0, timed="one program")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs the experiments with a progress bar; returns the document, which is also kept."""
    directory = arguments.directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    results = results_path("distributed", quick=arguments.quick)
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

        def on_run(case: Case, outcome: dict[str, Any]) -> None:
            shown = f"{outcome['seconds']:.3f} s" if outcome["status"] == "ok" else outcome["status"]
            console.print(f"{case}: {shown}", highlight=False)
            progress.update(task, advance=1, refresh=True)

        session = Session(
            directory=directory / "work",
            results=results,
            document=document,
            quick=arguments.quick,
            timeout_s=arguments.timeout,
            topologies=arguments.topologies,
            libraries=arguments.libraries,
            on_run=on_run,
        )
        task = progress.add_task("measuring", total=sum(module.count(session, rounds) for module in chosen))
        try:
            for repetition in range(rounds):
                for module in chosen:
                    module.measure(session, repetition)
        finally:
            shutil.rmtree(session.directory, ignore_errors=True)
            if arguments.directory is None:
                directory.rmdir()
            document["targets"] = as_json(evaluate(Results(document)))
            session.write()
    console.print(f"results: {session.results}")
    return document


if __name__ == "__main__":
    main()
