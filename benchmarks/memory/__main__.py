"""`python -m benchmarks.memory`: the memory tier against the disk; tables, targets, and the JSON.

Saves and recoveries of a transformer's state with Adam's moments, by other libraries and by Waystation, to
and from the disk, a slow store, and memory, of one host and of several that keep copies for each other; and
training with saves. Everything is measured in turns.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks import command
from benchmarks.distributed.session import Session
from benchmarks.memory import checkpoints, replication, training
from benchmarks.memory.report import show
from benchmarks.memory.targets import evaluate
from benchmarks.rounds import Document, Results

EXPERIMENTS = (checkpoints.NAME, replication.NAME, training.NAME)
FRAMEWORKS = tuple(checkpoints.OURS)


def main() -> None:
    arguments = _parse()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: measure(arguments, console)), console)


def _parse() -> argparse.Namespace:
    parser = command.experiments_parser(
        "benchmarks.memory", __doc__, EXPERIMENTS, timeout_s=1800.0, timed="one run"
    )
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, metavar="NAME")
    parser.add_argument(
        "--full", action="store_true", help="a state of 2.4 GB instead of 0.6, and steps of more than 1 s"
    )
    parser.add_argument(
        "--hosts", type=int, choices=replication.COUNTS, default=replication.HOSTS, help="of `replication`"
    )
    parser.add_argument(
        "--iterations", type=command.positive, help="of a training (default: 100, with --quick 4)"
    )
    return command.parsed(parser, rounds=(3, 1), iterations=(100, 4))


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Runs one experiment after another; returns the document, which is also kept."""
    with command.measuring(
        arguments,
        "memory",
        console,
        Session,
        lambda _: _count(arguments),
        lambda document: evaluate(Results(document)),
        facts={"full": arguments.full, "iterations": arguments.iterations},
    ) as session:
        _run(session, arguments)
    return session.document


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
