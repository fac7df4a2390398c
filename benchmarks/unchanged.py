"""`python -m benchmarks.unchanged`: a save of which most is unchanged, against a full save of the same state.

The state is a frozen model of 2.47 GB and low-rank adapters of one percent of its bytes, an adapter beside
each matrix. A round saves it whole, and then, with other adapters, twice with `unchanged_from` the save
before: the second save finds frozen and trained arrays mixed in the files of the first, the third does not.
All saves are durable, are made by one process, and are checked by a load in the first round, after the clock
has stopped. One round before the others is not counted. With `--store` the saves go to a local server of S3's
protocol (VersityGW), which shares the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command, states
from benchmarks.measure import settle_disks
from benchmarks.report import show_machine, show_targets
from benchmarks.rounds import Document, mean_and_deviation
from benchmarks.storage import server, systems
from benchmarks.targets import Line

SAVES = ("full", "second", "third")
TRAINED_SHARE = 0.01
MOST_BYTES, MOST_TIME = 1.1, 0.15


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.unchanged", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small state: does it work?")
    parser.add_argument("--rounds", type=command.positive, default=5)
    parser.add_argument("--directory", type=Path, help="on the file system that is measured")
    parser.add_argument("--store", action="store_true", help="save to an object store on that file system")
    command.add_report_argument(parser)
    arguments = parser.parse_args()
    console = command.wide_console()
    show(command.document_of(arguments, lambda: measure(arguments, console)), console)


def measure(arguments: argparse.Namespace, console: Console) -> Document:
    """Makes all saves; returns the document, which is also kept."""
    label = "unchanged-store" if arguments.store else "unchanged"
    with command.documented(arguments, label, console, evaluate) as (directory, document):
        document |= {"store": arguments.store, "runs": []}
        base = _base(arguments.quick)
        with _place(directory, is_store=arguments.store) as run_directory:
            for repetition in range(-1, arguments.rounds):
                for run in _round(run_directory, base, repetition, quick=arguments.quick):
                    shown = f"{run['save']}: {run['seconds']:.3f} s, {run['bytes'] / 1e6:.1f} MB"
                    console.print(shown, highlight=False)
                    document["runs"] += [run] if repetition >= 0 else []
    return document


@contextlib.contextmanager
def _place(directory: Path, *, is_store: bool) -> Iterator[str]:
    """Where checkpoints go: a directory, or the bucket of a server whose objects are in it. The environment
    says how that is reached."""
    if not is_store:
        yield os.fspath(directory)
        return
    with server.running(directory) as port:
        systems.reach(f"http://127.0.0.1:{port}")
        yield f"s3://{server.BUCKET}/run"


def _base(quick: bool) -> dict[str, Any]:
    """The frozen arrays, by their names."""
    base = {}
    for leaf in states.describe("llama", quick):
        base[leaf.name] = np.empty(leaf.nbytes, np.uint8)
        states.fill(leaf, base[leaf.name])
    return base


def _state(base: dict[str, Any], step: int) -> dict[str, Any]:
    """The base, and adapters of a step beside each array of it."""
    adapters = {
        f"{name}.lora": np.full(max(64, int(array.nbytes * TRAINED_SHARE)), step % 251, np.uint8)
        for name, array in base.items()
    }
    return states.nest({f"{name}.weight": array for name, array in base.items()} | adapters)


def _round(directory: str, base: dict[str, Any], repetition: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    import waystation

    seen: list[waystation.SaveStatistics] = []
    context = waystation.Context()
    context.array.saving.on_statistics = seen.append
    earlier: str | None = None
    for number, save in enumerate(SAVES):
        state = _state(base, 3 * (repetition + 1) + number)
        settle_disks(quick=quick)
        path = f"{directory}/{save}"
        with context:
            begun = time.perf_counter()
            waystation.save(path, state, unchanged_from=earlier)
            seconds = time.perf_counter() - begun
        if repetition == 0:
            loaded = states.flatten(waystation.load(path))
            assert all(np.array_equal(loaded[name], array) for name, array in states.flatten(state).items())
        trained = sum(array.nbytes for name, array in states.flatten(state).items() if name.endswith(".lora"))
        yield {
            "save": save,
            "round": repetition,
            "seconds": seconds,
            "bytes": seen[-1].bytes_written,
            "trained_bytes": trained,
        }
        earlier = path
    for save in SAVES:
        waystation.delete(f"{directory}/{save}")


def show(document: Document, console: Console) -> None:
    """Prints the table and the targets."""
    show_machine(document, console)
    where = "to an object store" if document.get("store") else "all durable"
    table = Table(title=f"saves of a model with adapters, {where}", title_justify="left")
    for heading in ("save", "s", "worst, s", "MB written", "of the full save's time"):
        table.add_column(heading)
    full = _values(document, "full")
    for save in SAVES:
        seconds = _values(document, save)
        ratio = statistics.median(one / whole for one, whole in zip(seconds, full, strict=True))
        written = statistics.median(_values(document, save, "bytes"))
        table.add_row(
            save, mean_and_deviation(seconds), f"{max(seconds):.2f}", f"{written / 1e6:.1f}", f"{ratio:.2f}"
        )
    console.print(table)
    show_targets(list(evaluate(document)), console)


def evaluate(document: Document) -> Iterator[Line]:
    """The bytes and the time of saves of which most is unchanged."""
    full = _values(document, "full")
    for save in SAVES[1:]:
        trained = _values(document, save, "trained_bytes")
        written = [one / own for one, own in zip(_values(document, save, "bytes"), trained, strict=True)]
        yield _line(f"{save} save: bytes of what has changed", written, MOST_BYTES)
        seconds = [one / whole for one, whole in zip(_values(document, save), full, strict=True)]
        yield _line(f"{save} save: time of a full save", seconds, MOST_TIME)


def _values(document: Document, save: str, member: str = "seconds") -> list[float]:
    return [float(run[member]) for run in document["runs"] if run["save"] == save]


def _line(text: str, ratios: list[float], most: float) -> Line:
    median = statistics.median(ratios)
    return Line(text, f"≤ {most:g}x", f"{median:.3f}x", f"{max(ratios):.3f}x", median <= most)


if __name__ == "__main__":
    main()
