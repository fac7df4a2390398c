"""`python -m benchmarks.orbax_table`: table 1 of the paper on Orbax, at the size of one machine.

The paper times saves (blocking and background) and loads of three sizes of Llama, 20 times each and in
isolation, and gives P50 [P90] and their ratios. Here the sizes are 0.55, 1.29 and 2.47 GB on a local
disk, everything is durable when the background part ends, loads are cold, and the systems are Orbax as
it comes, Orbax without OCDBT and compression, and Waystation, in turns and each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import RESULTS, measure, wide_console
from benchmarks.analysis import Results, Series
from benchmarks.plan import Selection
from benchmarks.targets import JAX

SIZES = ("llama-half-gb", "llama-1gb", "llama")
PEERS = ("orbax", "orbax-plain")
ROWS = (
    ("Save (blocking)", "save-async", "blocking"),
    ("Save (background)", "save-async", "background"),
    ("Load (cold)", "load-cold", "resident"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orbax_table")
    parser.add_argument("--repetitions", type=int, default=20, help="runs of each (default: 20)")
    parser.add_argument("--quick", action="store_true", help="small states: does everything work?")
    parser.add_argument("--directory", type=Path, help="where checkpoints go (default: beside results)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run (default: 900)")
    parser.add_argument("--resume", type=Path, help="go on with an unfinished results file")
    parser.add_argument("--report", type=Path, help="measure nothing; show this results file")
    arguments = parser.parse_args()
    console = wide_console()
    if arguments.report is not None:
        document = json.loads(arguments.report.read_text())
    else:
        selection = Selection(SIZES, (JAX, *PEERS), ("save-async", "load-cold"))
        document = measure(selection, arguments.repetitions, arguments, RESULTS, "orbax-table", console)
    show(Results(document), console)


def show(results: Results, console: Console) -> None:
    """Prints the table."""
    table = Table(title="P50 [P90] in seconds; how many times faster Waystation is, at P50 [P90]")
    for heading in ("operation", "size", "Waystation", *PEERS, *(f"against {peer}" for peer in PEERS)):
        table.add_column(heading, justify="left" if heading in ("operation", "size") else "right")
    for title, operation, metric in ROWS:
        for state in SIZES:
            ours = results.best(state, JAX, operation, metric)
            theirs = [results.best(state, peer, operation, metric) for peer in PEERS]
            ratios = (_ratio(ours, series) for series in theirs)
            table.add_row(title, _size(results, state), _cell(ours), *map(_cell, theirs), *ratios)
        table.add_section()
    console.print(table)


def _cell(series: Series | None) -> str:
    if series is None:
        return "not measured"
    return f"{series.percentile(50):.3f} [{series.percentile(90):.3f}] n={len(series.values)}"


def _ratio(ours: Series | None, theirs: Series | None) -> str:
    if ours is None or theirs is None:
        return "not measured"
    middle, tail = (theirs.percentile(percent) / ours.percentile(percent) for percent in (50, 90))
    return f"{middle:.1f}x [{tail:.1f}x]"


def _size(results: Results, state: str) -> str:
    sizes = [
        run["state_bytes"] for run in results.document["runs"] if run["state"] == state and "arrays" in run
    ]
    return f"{sizes[0] / 1e9:.2f} GB" if sizes else state


if __name__ == "__main__":
    main()
