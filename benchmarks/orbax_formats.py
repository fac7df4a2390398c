"""`python -m benchmarks.orbax_formats`: durable saves that genuine Orbax can load.

Of 2.47 GB in 146 arrays, or of 4,000 small arrays (`--state small`), for which plain loops are no measure.
By Orbax as it comes (OCDBT with zstd) and at its fastest setting (neither), by Waystation in the same two
layouts and as OCDBT without compression, and by plain loops that write as many bytes: in turns, each in a
fresh process. Orbax leaves its metadata and directories to the system, so what it wrote is flushed before
its time ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.analysis import Ratio, Results, Series
from benchmarks.command import measured, session_parser, wide_console
from benchmarks.plan import Selection

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
    parser = session_parser("benchmarks.orbax_formats", 3)
    parser.add_argument("--state", choices=STATES, default=STATES[0], help="what is saved (default: llama)")
    arguments = parser.parse_args()
    console = wide_console()
    selection = Selection((arguments.state,), SYSTEMS, ("save",), LIMIT_WAYS)
    document = measured(arguments, selection, "orbax-formats", console)
    show(Results(document), arguments.state, console)


def show(results: Results, state: str, console: Console) -> None:
    """Prints what was measured, and the targets."""
    times = Table(title="Durable saves, in seconds")
    for heading in ("system", "median", "worst", "runs"):
        times.add_column(heading, justify="left" if heading == "system" else "right")
    for name in SYSTEMS:
        series = _saves(results, state, name)
        if series is not None:
            shown = f"{name} ({series.way})" if name == LIMIT else name
            times.add_row(shown, f"{series.median:.2f}", f"{series.worst:.2f}", str(len(series.values)))
    console.print(times)
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
