"""`python -m benchmarks.orbax_formats`: durable saves that genuine Orbax can load.

Of 2.47 GB in 146 arrays, or of 4,000 small arrays (`--state small`), for which plain loops are no measure.
By Orbax as it comes (OCDBT with zstd) and at its fastest setting (neither), by Waystation in the same two
layouts and as OCDBT without compression, and by plain loops that write as many bytes: in turns, each in a
fresh process. Orbax leaves its metadata and directories to the system, so what it wrote is flushed before
its time ends.
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
from benchmarks.session import build_ring_program

STATES = ("llama", "small")
FILES, OCDBT, OCDBT_PLAIN = "waystation-files", "waystation-ocdbt", "waystation-ocdbt-plain"
AS_IT_COMES, FASTEST, LIMIT = "orbax", "orbax-plain", "limit"
SYSTEMS = (LIMIT, FILES, OCDBT, OCDBT_PLAIN, AS_IT_COMES, FASTEST)

# Those that win somewhere; a round of all would take three times as long.
LIMIT_WAYS = frozenset(
    {
        "threads direct 8 MiB x1",
        "threads direct 1 MiB x4 preallocated",
        "ring direct 4 MiB x1 depth 4",
        "ring direct 1 MiB x1 depth 8 preallocated",
    }
)

# Ours, against what, and how many times as fast it is to be.
TARGETS = (
    (FILES, AS_IT_COMES, 4.0),
    (FILES, FASTEST, 1.0),
    (FILES, LIMIT, 0.8),
    (OCDBT, AS_IT_COMES, 1.0),
    (OCDBT_PLAIN, AS_IT_COMES, 4.0),
    (OCDBT_PLAIN, FASTEST, 1.0),
    (OCDBT_PLAIN, LIMIT, 0.8),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orbax_formats")
    parser.add_argument("--state", choices=STATES, default=STATES[0], help="what is saved (default: llama)")
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
        if reason := build_ring_program():
            console.print(f"[yellow]The limit is measured without io_uring: {reason}[/]")
        selection = Selection((arguments.state,), SYSTEMS, ("save",), LIMIT_WAYS)
        document = measure(selection, arguments.repetitions, arguments, RESULTS, "orbax-formats", console)
    show(Results(document), arguments.state, console)


def show(results: Results, state: str, console: Console) -> None:
    """Prints what was measured, and the targets."""
    measured = Table(title="Durable saves, in seconds")
    for heading in ("system", "median", "worst", "runs"):
        measured.add_column(heading, justify="left" if heading == "system" else "right")
    for name in SYSTEMS:
        series = _saves(results, state, name)
        if series is not None:
            shown = f"{name} ({series.way})" if name == LIMIT else name
            measured.add_row(shown, f"{series.median:.2f}", f"{series.worst:.2f}", str(len(series.values)))
    console.print(measured)
    targets = Table(title="Speed of one over that of another, at the median [in the worst round]")
    for heading in ("of", "over", "target", "measured", "reached"):
        targets.add_column(heading, justify="left" if heading in ("of", "over") else "right")
    for row in lines(results, state):
        targets.add_row(*row)
    console.print(targets)


def lines(results: Results, state: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Of every target that could be measured: who, against whom, the target, the ratio, and whether."""
    for ours, other, target in TARGETS:
        mine, theirs = _saves(results, state, ours), _saves(results, state, other)
        if mine is not None and theirs is not None:
            ratio = Ratio.of(mine, theirs)
            shown = f"{ratio.median:.2f} [{ratio.worst:.2f}]"
            yield ours, other, f"{target:.1f}", shown, "yes" if ratio.median >= target else "no"


def _saves(results: Results, state: str, system: str) -> Series | None:
    return results.best(state, system, "save", "durable")


if __name__ == "__main__":
    main()
