"""`python -m benchmarks.transport`: prints how long a hand-over of a block takes, by system and size.

Rounds measure every system in turn, each in fresh processes, and begin with another one each time. The table
has the medians over rounds, as bytes per second (microseconds for what is small), and their ratio to the raw
socket.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import machine
from benchmarks.command import add_report_argument, results_path, wide_console
from benchmarks.processes import Outcome, spawn
from benchmarks.transport.systems import SYSTEMS
from benchmarks.transport.worker import TransportRequest

SIZES = (4, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
QUICK_SIZES = (4, 64 << 10, 4 << 20)
SMALL_BYTES = 64 << 10
REFERENCE = "raw socket"
Runs = dict[str, list[Outcome]]


def main() -> None:
    """Measures, or shows what was measured."""
    arguments = parser().parse_args()
    if arguments.report is not None:
        document = arguments.report
    else:
        document = session(arguments)
        path = results_path("transport", quick=arguments.quick)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1))
    console = wide_console()
    console.print(table(document["runs"], document["sizes"]))
    for system, runs in document["runs"].items():
        for run in runs:
            if run["status"] != "ok":
                console.print(f"{system}: {run['status']}: {run['reason']}", highlight=False)
                break


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    found = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    found.add_argument("--quick", action="store_true", help="small blocks, one round: does everything work?")
    found.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    found.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME")
    add_report_argument(found)
    return found


def session(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures everything in rounds."""
    sizes = QUICK_SIZES if arguments.quick else SIZES
    systems: list[str] = arguments.systems
    runs: Runs = {system: [] for system in systems}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds or (1 if arguments.quick else 3)):
            turn = number % len(systems)
            for system in systems[turn:] + systems[:turn]:
                request = TransportRequest(
                    output=f"{scratch}/outcome.json",
                    system=system,
                    sizes=sizes,
                    budget_s=0.2 if arguments.quick else 2.0,
                )
                runs[system].append(spawn("benchmarks.transport.worker", request, 300.0))
        return {"machine": machine.describe(Path(scratch)), "sizes": sizes, "runs": runs}


def table(runs: Runs, sizes: list[int]) -> Table:
    """A row for each system, a column for each size."""
    found = Table(title="hand-over of a block: median of the rounds (ratio of speeds to the raw socket)")
    found.add_column("system")
    for nbytes in sizes:
        found.add_column(_size(nbytes), justify="right")
    for system, outcomes in runs.items():
        cells = [
            _cell(_median(outcomes, nbytes), _median(runs.get(REFERENCE, []), nbytes), nbytes)
            for nbytes in sizes
        ]
        found.add_row(system, *cells)
    return found


def _median(outcomes: list[Outcome], nbytes: int) -> float | None:
    times = [run["seconds"][str(nbytes)] for run in outcomes if run["status"] == "ok"]
    return statistics.median(times) if times else None


def _cell(seconds: float | None, reference: float | None, nbytes: int) -> str:
    if seconds is None:
        return "-"
    shown = f"{seconds * 1e6:.0f} us" if nbytes <= SMALL_BYTES else f"{nbytes / seconds / 1e9:.2f} GB/s"
    return shown if reference is None else f"{shown} ({reference / seconds:.2f})"


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


if __name__ == "__main__":
    main()
