"""`python -m benchmarks.orbax_formats_load`: loads of what genuine Orbax has saved, by us and by Orbax.

Orbax saves 2.47 GB as it comes (OCDBT with zstd) and at its fastest settings (neither); both libraries load
both, from the disk and from the page cache, in turns and each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import RESULTS, measure, wide_console
from benchmarks.analysis import Ratio, Results, Series
from benchmarks.plan import Selection

STATE = "llama"
OPERATIONS = ("load-cold", "load-warm")
# Ours, the peer, and how many times as fast ours is to be.
PAIRS = (("waystation-of-orbax", "orbax", 1.0), ("waystation-of-orbax-plain", "orbax-plain", 2.0))
TITLES = {"load-cold": "from the disk", "load-warm": "from the page cache"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orbax_formats_load")
    parser.add_argument("--state", default=STATE, help=f"what is loaded (default: {STATE})")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a small state: does everything work?")
    parser.add_argument("--directory", type=Path, help="where checkpoints go (default: beside results)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run (default: 900)")
    parser.add_argument("--resume", type=Path, help="go on with an unfinished results file")
    parser.add_argument("--report", type=Path, help="measure nothing; show this results file")
    arguments = parser.parse_args()
    console = wide_console()
    if arguments.report is not None:
        document = json.loads(arguments.report.read_text())
    else:
        systems = tuple(name for ours, peer, _ in PAIRS for name in (ours, peer))
        selection = Selection((arguments.state,), systems, ("save", *OPERATIONS))
        document = measure(
            selection, arguments.repetitions, arguments, RESULTS, "orbax-formats-load", console
        )
    show(Results(document), arguments.state, console)


def show(results: Results, state: str, console: Console) -> None:
    """Prints the table."""
    table = Table(
        title="Loads of Orbax's checkpoints: seconds at the median, speed over Orbax's [worst round]"
    )
    for heading in ("saved by", "load", "Waystation", "Orbax", "speed", "target", "reached"):
        table.add_column(heading, justify="left" if heading in ("saved by", "load") else "right")
    for row in rows(results, state):
        table.add_row(*row)
    console.print(table)


def rows(results: Results, state: str) -> Iterator[tuple[str, ...]]:
    """What was measured of every checkpoint and way to load it."""
    for ours, peer, target in PAIRS:
        for operation in OPERATIONS:
            mine = results.best(state, ours, operation, "loaded")
            theirs = results.best(state, peer, operation, "loaded")
            if mine is None or theirs is None:
                continue
            ratio = Ratio.of(mine, theirs)
            reached = "yes" if ratio.median >= target else "no"
            speed = f"{ratio.median:.2f} [{ratio.worst:.2f}]"
            yield (
                peer,
                TITLES[operation],
                _seconds(mine),
                _seconds(theirs),
                speed,
                f"{target:.1f}",
                reached,
            )


def _seconds(series: Series) -> str:
    return f"{series.median:.2f}"


if __name__ == "__main__":
    main()
