"""`python -m benchmarks.runtime`: the runtime's one controller against multi-controller JAX and Ray; tables,
targets, and the JSON.
"""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks import command
from benchmarks.processes import Outcome
from benchmarks.rounds import Document, Results
from benchmarks.runtime.report import EXPERIMENTS, evaluate, show
from benchmarks.runtime.session import Session
from benchmarks.runtime.shapes import Shape

SHAPES = (Shape(1, 2), Shape(2, 1))
QUICK_SHAPES = (Shape(2, 1),)
ROUNDS = 5


def main() -> None:
    arguments = _parse()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: measure(arguments, console)), console)


def _shape(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError:
        problem = f"'{text}' is no HOSTSxDEVICES, as 2x1: both at least 1"
        raise argparse.ArgumentTypeError(problem) from None


def _parse() -> argparse.Namespace:
    parser = command.experiments_parser(
        "benchmarks.runtime",
        __doc__,
        EXPERIMENTS,
        timeout_s=900.0,
        timed="one part of an experiment",
        rounds=ROUNDS,
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shape,
        metavar="HOSTSxDEVICES",
        help="hosts, and devices of each (default: 1x2 2x1; also 4x1)",
    )
    parser.add_argument("--seconds", type=float, help="of one thing in one round (default: 1)")
    return command.parsed(parser, rounds=(ROUNDS, 1), shapes=(SHAPES, QUICK_SHAPES), seconds=(1.0, 0.05))


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Runs the experiments; returns the document, which is also kept."""
    with command.measuring(
        arguments,
        "runtime",
        console,
        Session,
        lambda session: len(session.parts()),
        lambda document: evaluate(Results(document)),
        _shown,
        experiments=[EXPERIMENTS[name] for name in arguments.experiments],
        shapes=arguments.shapes,
        rounds=arguments.rounds,
        budget_s=arguments.seconds,
    ) as session:
        session.run()
    return session.document


def _shown(case: object, outcome: Outcome) -> str:
    """A part for who waits."""
    return f"{case}: {outcome['runs']} runs" if outcome["status"] == "ok" else f"{case}: {outcome['reason']}"


if __name__ == "__main__":
    main()
