"""`python -m benchmarks.distributed`: programs of several processes; tables, targets, and the JSON."""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks import command
from benchmarks.distributed import disk, reshard
from benchmarks.distributed.models import TOPOLOGIES
from benchmarks.distributed.report import EXPERIMENTS, evaluate, show
from benchmarks.distributed.session import Session
from benchmarks.distributed.systems import LIBRARIES
from benchmarks.rounds import Document, Results


def main() -> None:
    arguments = _parse()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: measure(arguments, console)), console)


def _parse() -> argparse.Namespace:
    parser = command.experiments_parser(
        "benchmarks.distributed", __doc__, EXPERIMENTS, timeout_s=600.0, timed="one program"
    )
    parser.add_argument(
        "--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES), help="of `reshard`, by name"
    )
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES, metavar="NAME", help="of `reshard`"
    )
    return command.parsed(parser, rounds=(3, 1))


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Runs the experiments, round after round; returns the document, which is also kept."""
    if {disk.NAME, reshard.NAME} & set(arguments.experiments):
        command.say_without_ring(console)
    chosen = [EXPERIMENTS[name] for name in arguments.experiments]
    with command.measuring(
        arguments,
        "distributed",
        console,
        Session,
        lambda session: sum(module.count(session, arguments.rounds) for module in chosen),
        lambda document: evaluate(Results(document)),
        topologies=arguments.topologies,
        libraries=arguments.libraries,
    ) as session:
        for repetition in range(arguments.rounds):
            for module in chosen:
                module.measure(session, repetition)
    return session.document


if __name__ == "__main__":
    main()
