"""`python -m benchmarks.races`: two writers that save to one path of an object store at once, many times.

Each race is between two processes, with clients of their own, that save different states to one new path of a
local server of S3's protocol (VersityGW). It is right if exactly one of them commits, the other gets
Conflict, what is there is the winner's, whole, and nothing else is left beneath the path. Pairs of processes
race side by side. Each race begins when both writers are ready; how far apart they commit is left to the
system. So it is counted how many of the losers found out at the commit, and not before.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.report import show_machine, show_targets
from benchmarks.rounds import Document
from benchmarks.storage import server, systems
from benchmarks.targets import Line

RACES, QUICK_RACES = 10_000, 20
WON, CONFLICT, AT_COMMIT = "won", "conflict", "conflict at the commit"
OUTCOMES = (
    "races",
    "one winner",
    "two winners",
    "no winner",
    "conflicts",
    "at the commit",
    "other errors",
    "wrong",
    "leftovers",
)
_VALUES = 4096
_SHOWN_EVERY_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.races", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RACES} races: does it work?")
    parser.add_argument("--races", type=command.positive, help=f"how many (default: {RACES:,})")
    parser.add_argument("--pairs", type=command.positive, default=2, help="that race side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no race after so long")
    parser.add_argument("--directory", type=Path, help="where the server keeps its objects")
    command.add_report_argument(parser)
    arguments = parser.parse_args()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: measure(arguments, console)), console)


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Has all races run; returns the document, which is also kept."""
    wanted = arguments.races or (QUICK_RACES if arguments.quick else RACES)
    begun_s = time.monotonic()
    with (
        command.documented(arguments, "races", console, evaluate) as (directory, document),
        server.running(directory) as port,
        _pairs(arguments.pairs, port, wanted, arguments.seconds) as pairs,
    ):
        found = _collected(pairs, wanted, console)
        document |= {"outcomes": dict(found), "seconds": time.monotonic() - begun_s, "wanted": wanted}
    return document


def _collected(pairs: list[Connection], wanted: int, console: Console) -> Counter[str]:
    """The sum of what the pairs tell, as they go."""
    found: Counter[str] = Counter()
    told_s = time.monotonic()
    while pairs:
        for pair in multiprocessing.connection.wait(pairs):
            assert isinstance(pair, Connection)
            try:
                found.update(pair.recv())
            except EOFError:
                pairs.remove(pair)
        if time.monotonic() - told_s > _SHOWN_EVERY_S:
            told_s = time.monotonic()
            console.print(
                f"{found['races']} of {wanted} races: {found['one winner']} with one winner", highlight=False
            )
    return found


# ---- the writers -------------------------------------------------------------------------------


@contextlib.contextmanager
def _pairs(count: int, port: int, races: int, seconds: float) -> Iterator[list[Connection]]:
    """Starts pairs of processes, which share the races out; gives what each tells."""
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for number in range(count):
        own = races // count + (number < races % count)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_referee, args=(theirs, port, number, own, seconds))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    try:
        yield ends
    finally:
        for process in processes:
            process.join(60.0)
            if process.is_alive():
                process.kill()
                process.join()


def _referee(told: Connection, port: int, pair: int, races: int, seconds: float) -> None:
    """One writer, which also starts the other one and looks at what is left."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_second, args=(theirs, port), daemon=True)
    other.start()
    theirs.close()
    systems.reach(f"http://127.0.0.1:{port}")
    deadline_s = time.monotonic() + seconds
    assert ours.recv() == "ready"
    for race in range(races):
        if time.monotonic() > deadline_s:
            break
        path = f"s3://{server.BUCKET}/races/{pair}-{race}"
        ours.send(path)
        assert ours.recv() == "set"
        outcomes = [_save(path, 1)]
        outcomes.append(ours.recv())
        told.send(_judged(path, outcomes))
    ours.send("")
    other.join()
    told.close()


def _second(told: Connection, port: int) -> None:
    systems.reach(f"http://127.0.0.1:{port}")
    import waystation  # noqa: F401 the import is no part of a race

    told.send("ready")
    while path := told.recv():
        told.send("set")
        told.send(_save(path, 2))


def _state(value: int) -> dict[str, Any]:
    return {"values": np.full(_VALUES, value, np.int32), "value": value}


def _save(path: str, value: int) -> str:
    import waystation
    from waystation.errors import Conflict

    try:
        waystation.save(path, _state(value))
    except Conflict as error:
        return AT_COMMIT if "was faster" in str(error) else CONFLICT
    except Exception as error:
        return repr(error)
    return WON


def _judged(path: str, outcomes: list[str]) -> Counter[str]:
    """What one race adds to the sums; removes the checkpoint."""
    import waystation
    from waystation import storage

    winners = [value for value, outcome in enumerate(outcomes, 1) if outcome == WON]
    found: Counter[str] = Counter({"races": 1})
    found[{0: "no winner", 1: "one winner"}.get(len(winners), "two winners")] += 1
    found["conflicts"] += outcomes.count(CONFLICT) + outcomes.count(AT_COMMIT)
    found["at the commit"] += outcomes.count(AT_COMMIT)
    found["other errors"] += sum(outcome not in (WON, CONFLICT, AT_COMMIT) for outcome in outcomes)
    if winners:
        loaded = waystation.load(path)
        is_whole = loaded["value"] in winners and (loaded["values"] == loaded["value"]).all()
        found["wrong"] += not is_whole
    beneath = [entry.name for entry in storage.entries_or_none(path)]
    found["leftovers"] += max(0, len(beneath) - (2 if winners else 0))  # the record, and the data
    if winners:
        waystation.delete(path)
        found["leftovers"] += len(storage.entries_or_none(path)) if len(beneath) == 2 else 0
    return found


# ---- the report --------------------------------------------------------------------------------


def show(document: Document, console: Console) -> None:
    """Prints the table and the targets."""
    show_machine(document, console)
    table = Table(title="two writers at one path of an object store", title_justify="left")
    for heading in OUTCOMES:
        table.add_column(heading)
    table.add_row(*(f"{document['outcomes'].get(outcome, 0):,}" for outcome in OUTCOMES))
    console.print(table)
    console.print(f"{document['seconds']:.0f} s", highlight=False)
    show_targets(list(evaluate(document)), console)


def evaluate(document: Document) -> Iterator[Line]:
    """One winner in each race, a Conflict for the other, and nothing left."""
    found: Counter[str] = Counter(document["outcomes"])
    races = found["races"]
    for outcome, needed in (("one winner", races), ("conflicts", races), ("wrong", 0), ("leftovers", 0)):
        is_reached = found[outcome] == needed and races > 0
        yield Line(f"{outcome} in {races:,} races", f"{needed:,}", f"{found[outcome]:,}", "", is_reached)


if __name__ == "__main__":
    main()
