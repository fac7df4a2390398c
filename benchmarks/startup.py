"""`python -m benchmarks.startup`: from the start of a process to what a model says; only loaders differ.

A small Llama runs on the CPU through transformers; its weights are brought by transformers itself, by other
libraries, by Waystation, and by code written for others whose import is changed (`startup_loaders.py`).
Every start is a fresh process, with the model's files in the page cache (warm) and not (cold); the libraries
always are. The raw read limit is measured in the same rounds. Every process has to say the same tokens, and
in the first round its weights are compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine, measure, startup_report
from benchmarks.command import add_common_arguments, results_path, wide_console
from benchmarks.distributed.session import Case, Outcome, Session
from benchmarks.session import ROOT, SCHEMA, build_ring_program, default_directory
from benchmarks.startup_job import Request
from benchmarks.startup_loaders import LOADERS
from benchmarks.startup_model import EXPECTED, MODEL_DIRECTORY, RAW_DIRECTORY, SIZES
from benchmarks.systems.limit import Limit

EXPERIMENT = "startup"
CACHES = ("cold", "warm")
TOKENS = 128
SPARE_BYTES = 1 << 30  # what the libraries take
# The best from the disk and from the page cache.
LIMIT_WAYS = (
    "threads direct 1 MiB x4",
    "ring direct 4 MiB x1 depth 8",
    "threads buffered 1 MiB x4",
    "threads buffered 8 MiB x4",
)


def main() -> None:
    arguments = _parse()
    console = wide_console()
    if arguments.report is not None:
        document = json.loads(arguments.report.read_text())
    else:
        if reason := build_ring_program():
            console.print(f"[yellow]The limit is measured without io_uring: {reason}[/]")
        document = _measure(arguments, console)
    startup_report.show(document, console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS), metavar="LOADER")
    parser.add_argument("--size", choices=SIZES, help="of the model (default: half-gb, with --quick tiny)")
    parser.add_argument("--tokens", type=int, help=f"that are said (default: {TOKENS}, with --quick 8)")
    parser.add_argument("--repetitions", type=int, help="rounds (default: 3, with --quick 1)")
    add_common_arguments(parser, timeout_s=300.0, timed="one start")
    arguments = parser.parse_args()
    for name, usual, quick in (("size", "half-gb", "tiny"), ("tokens", TOKENS, 8), ("repetitions", 3, 1)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
    if arguments.tokens < 2 or arguments.repetitions < 1:
        parser.error("--tokens must be at least 2, --repetitions at least 1")
    return arguments


def _measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs the rounds with a progress bar; returns the document, which is also kept."""
    directory = arguments.directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    cases = cases_of(arguments.loaders)
    results = results_path(EXPERIMENT, quick=arguments.quick)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.describe(directory),
        "quick": arguments.quick,
        "tokens": arguments.tokens,
        "runs": [],
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn only between runs: on few cores a busy progress bar would be part of the measurement.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=len(cases) * arguments.repetitions)

        def on_run(case: Case, outcome: Outcome) -> None:
            shown = startup_report.one_line(outcome)
            console.print(f"{case.system} ({case.operation}), {case.subject}: {shown}", highlight=False)
            progress.update(task, advance=1, refresh=True)

        session = Session(
            directory=directory / "work",
            results=results,
            document=document,
            quick=arguments.quick,
            timeout_s=arguments.timeout,
            on_run=on_run,
        )
        try:
            run(session, cases, arguments.size, arguments.tokens, arguments.repetitions)
        finally:
            shutil.rmtree(session.directory, ignore_errors=True)
            if arguments.directory is None:
                directory.rmdir()
    console.print(f"results: {results}")
    return document


def cases_of(loaders: list[str]) -> list[Case]:
    """Everything that is measured in a round."""
    ways = [(name, way) for name in loaders for way in LOADERS[name].ways]
    ways += [(Limit.name, way) for way in LIMIT_WAYS]
    return [Case(EXPERIMENT, cache, name, way) for name, way in ways for cache in CACHES]


def run(session: Session, cases: list[Case], size: str, tokens: int, repetitions: int) -> None:
    """Writes the model and starts it in every way, round after round.

    Raises:
        SystemExit: The model cannot be written, such as without transformers.
    """
    directory = session.directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    writing = [sys.executable, "-m", "benchmarks.startup_model", str(directory), size, str(tokens)]
    written = subprocess.run(
        writing, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
    )
    if written.returncode:
        raise SystemExit(f"the model could not be written:\n{written.stderr[-2000:]}")
    session.document["model"] = {"size": size, **json.loads((directory / EXPECTED).read_text())}
    unavailable: dict[tuple[str, str], Outcome] = {}
    for repetition in range(repetitions):
        for case in in_turns(cases, repetition):
            outcome = unavailable.get((case.system, case.operation))
            if outcome is None:
                outcome = _spawn(session, case, tokens, verify=repetition == 0)
            if outcome["status"] == "missing":
                unavailable[case.system, case.operation] = outcome
            session.record(case, repetition, outcome)


def in_turns(cases: list[Case], repetition: int) -> Iterator[Case]:
    """The cases, beginning with others in each round."""
    first = repetition * len(cases) // 3 % len(cases)
    yield from cases[first:]
    yield from cases[:first]


def _spawn(session: Session, case: Case, tokens: int, *, verify: bool) -> Outcome:
    """One process; its outcome, or why there is none."""
    directory = session.directory
    read = directory / (RAW_DIRECTORY if case.system == Limit.name else MODEL_DIRECTORY)
    output = directory / "outcome.json"
    output.unlink(missing_ok=True)
    if case.subject == "cold":
        measure.forget(read)
    else:
        measure.make_warm(read)
    measure.back_free_memory(session.document["model"]["bytes"] + SPARE_BYTES)
    cached_bytes = measure.cached_bytes(read)
    request = Request(
        loader=case.system,
        way=case.operation,
        directory=str(directory),
        output=str(output),
        tokens=tokens,
        verify=verify,
        started_s=time.monotonic(),
    )
    command = [sys.executable, "-m", "benchmarks.startup_job", request.to_json()]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=session.timeout_s,
            cwd=ROOT,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not finished after {session.timeout_s:.0f} s"}
    if not output.exists():
        reason = f"the process ended with status {done.returncode}: {done.stderr[-2000:]}"
        return {"status": "failed", "reason": reason}
    outcome: Outcome = json.loads(output.read_text())
    return {**outcome, "cached_bytes": cached_bytes}


def _environment() -> dict[str, str]:
    """That of a process: nothing is asked of a network, or found on other devices."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


if __name__ == "__main__":
    main()
