"""What the benchmarks' commands share: their arguments, a session with a progress bar, its document."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import analysis, machine
from benchmarks.measure import UNUSED_MEMORY
from benchmarks.plan import Selection
from benchmarks.processes import ROOT, Outcome
from benchmarks.reservoir import Reservoir
from benchmarks.rounds import Document, Workplace
from benchmarks.session import SCHEMA, Session, build_ring_program, default_directory
from benchmarks.targets import NATIVE, Line, Standard, as_json

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
    add_report_argument(parser)


def add_report_argument(parser: argparse.ArgumentParser, instead: str = "measure nothing") -> None:
    """Adds `--report`: the document of the results file that it names, None without it."""
    parser.add_argument(
        "--report", type=json_document, metavar="FILE", help=f"{instead}; show this results file"
    )


def json_document(text: str) -> Document:
    """The document in the file that an argument names.

    Raises:
        argparse.ArgumentTypeError: The file cannot be read, or holds no JSON object.
    """
    try:
        document = json.loads(Path(text).read_bytes())
    except OSError as error:
        problem = f"'{text}' cannot be read: {error.strerror or error}"
        raise argparse.ArgumentTypeError(problem) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' holds no JSON: {error}") from None
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError(f"'{text}' holds no JSON object")
    return document


def json_path(text: str) -> Path:
    """The path of such a file; raises likewise."""
    json_document(text)
    return Path(text)


def rounds_parser(program: str, description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser for what is measured in rounds, see `documented`; `quick` says what is left then."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--directory", type=Path, help="on the file system that is measured")
    add_report_argument(parser)
    return parser


def experiments_parser(
    program: str,
    description: str | None,
    experiments: Iterable[str],
    *,
    timeout_s: float,
    timed: str,
    rounds: int = 3,
) -> argparse.ArgumentParser:
    """A parser for experiments that are measured in rounds; `parsed` is told how many again."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    names = list(experiments)
    parser.add_argument("--experiments", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--rounds", type=positive, help=f"of every experiment (default: {rounds}, with --quick 1)"
    )
    add_common_arguments(parser, timeout_s=timeout_s, timed=timed)
    return parser


def parsed(parser: argparse.ArgumentParser, **defaults: tuple[Any, Any]) -> argparse.Namespace:
    """The arguments; what was not given is the first of its defaults, or with `--quick` the second."""
    arguments = parser.parse_args()
    for name, (usual, quick) in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
    return arguments


def session_parser(program: str, repetitions: int, description: str | None = None) -> argparse.ArgumentParser:
    """A parser with the arguments of `measured`."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "--repetitions", type=positive, help=f"rounds (default: {repetitions}, with --quick 2)"
    )
    parser.add_argument(
        "--resume", type=json_path, metavar="FILE", help="go on with an unfinished results file"
    )
    parser.add_argument(
        "--memory",
        choices=("used", "unused"),
        default="used",
        help="whether free memory was used lately; the host of a virtual machine takes back what was not "
        "(default: used)",
    )
    parser.set_defaults(usual_repetitions=repetitions)
    add_common_arguments(parser, timeout_s=900.0, timed="one run")
    return parser


def add_charts_argument(parser: argparse.ArgumentParser) -> None:
    """Adds where figures go, if anywhere: a directory, since `make bench` gives it to two commands."""
    parser.add_argument(
        "--charts", type=Path, metavar="DIRECTORY", help="draw the figures into a directory (docs/images)"
    )


def positive(text: str) -> int:
    """The number that an argument is.

    Raises:
        argparse.ArgumentTypeError: It is less than 1.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def say_without_ring(console: Console) -> None:
    """Where the limit is measured and its ring ways cannot be built, that is said."""
    if reason := build_ring_program():
        console.print(f"[yellow]The limit is measured without io_uring: {reason}[/]")


def measured(
    arguments: argparse.Namespace,
    selection: Selection,
    label: str,
    console: Console,
    standard: Standard = NATIVE,
) -> Document:
    """The document of a plan that the arguments ask for: of an earlier session, or of one that is run now."""

    def measure() -> Document:
        if "limit" in selection.systems:
            say_without_ring(console)
        with measuring(
            arguments,
            label,
            console,
            Session,
            Session.count,
            lambda document: standard.evaluate(analysis.Results(document)),
            _every_time,
            selection=selection,
            repetitions=arguments.repetitions or (2 if arguments.quick else arguments.usual_repetitions),
        ) as session:
            session.run()
        return session.document

    return document_of(arguments, measure)


def document_of(arguments: argparse.Namespace, measure: Callable[[], Document]) -> Document:
    """What `--report` names, or what is measured now."""
    earlier: Document | None = arguments.report
    return measure() if earlier is None else earlier


AnySession = TypeVar("AnySession", bound=Workplace)


def one_time(case: object, outcome: Outcome) -> str:
    """A run for who waits, of which one time counts."""
    shown = f"{outcome['seconds']:.3f} s" if outcome["status"] == "ok" else outcome["status"]
    return f"{case}: {shown}"


def _every_time(case: object, outcome: Outcome) -> str:
    shown = ", ".join(f"{name} {value:.3f} s" for name, value in outcome.get("seconds", {}).items())
    return f"{case}: {shown or outcome['status']}"


@contextmanager
def measuring(
    arguments: argparse.Namespace,
    label: str,
    console: Console,
    kind: Callable[..., AnySession],
    count: Callable[[AnySession], int],
    evaluate: Callable[[Document], Iterable[Line]],
    shown: Callable[[Any, Outcome], str] = one_time,
    facts: Document | None = None,
    **members: Any,
) -> Iterator[AnySession]:
    """A session with a progress bar, whose document is kept as a file with what is reached of the targets.

    Whoever is told to end removes what it has made, and takes its processes along.

    Args:
        arguments: See `add_common_arguments`.
        label: In the name of the file.
        console: Where runs are told of.
        kind: Of the session.
        count: How many runs it makes.
        evaluate: Its targets.
        shown: A run, for who waits.
        facts: For the document.
        **members: Of the session.
    """
    directory = arguments.directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True)
    results, document = _document(arguments, directory, label, facts or {})
    # Redrawn only between runs: on few cores a busy progress bar would be part of the measurement.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:

        def on_run(case: Any, outcome: Outcome) -> None:
            console.print(shown(case, outcome), highlight=False)
            progress.update(task, advance=1, refresh=True)

        session = kind(
            directory=directory / "work",
            results=results,
            document=document,
            quick=document["quick"],
            timeout_s=arguments.timeout,
            on_run=on_run,
            **members,
        )
        task = progress.add_task("measuring", total=count(session))
        previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            with _free_memory(document["memory"]):
                yield session
        finally:
            signal.signal(signal.SIGTERM, previous)
            session.remove()
            if arguments.directory is None:
                directory.rmdir()
            document["targets"] = as_json(list(evaluate(document)))
            session.write()
    console.print(f"results: {results}")


@contextmanager
def documented(
    arguments: argparse.Namespace,
    label: str,
    console: Console,
    evaluate: Callable[[Document], Iterable[Line]],
) -> Iterator[tuple[Path, Document]]:
    """An empty directory to measure in, and a document to fill, which is kept in the end if nothing failed.

    Args:
        arguments: `directory` and `quick`.
        label: In the name of the file.
        console: Where that name is told.
        evaluate: The targets, by what the document has then.
    """
    parent = arguments.directory or default_directory()
    directory = parent / label
    directory.mkdir(parents=True)
    document: Document = {"machine": machine.describe(directory), "quick": arguments.quick}
    try:
        yield directory, document
    finally:
        shutil.rmtree(directory if arguments.directory else parent)
    document["targets"] = as_json(list(evaluate(document)))
    results = results_path(label, quick=arguments.quick)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"results: {results}")


@contextmanager
def _free_memory(state: str) -> Iterator[None]:
    """Sees to the state of free memory for the processes of a session."""
    if state == "used":
        with Reservoir():
            yield
        return
    os.environ[UNUSED_MEMORY] = "1"
    try:
        yield
    finally:
        del os.environ[UNUSED_MEMORY]


def _document(
    arguments: argparse.Namespace, directory: Path, label: str, facts: Document
) -> tuple[Path, Document]:
    """The results file: the one to go on with, or a new one."""
    earlier = getattr(arguments, "resume", None)
    if earlier is not None:
        document = json.loads(earlier.read_text())
        document["runs"] = [run for run in document["runs"] if run["status"] == "ok"]
        document.setdefault("memory", "used")  # of a file from before there was a choice
        return earlier, document
    document = {
        "schema": SCHEMA,
        "machine": machine.describe(directory),
        "quick": arguments.quick,
        "memory": getattr(arguments, "memory", "used"),
        **facts,
        "runs": [],
    }
    return results_path(label, quick=arguments.quick), document
