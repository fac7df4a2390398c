"""`python -m benchmarks.orbax_formats_load`: loads of what genuine Orbax has saved, by us and by Orbax.

Orbax saves 2.47 GB as it comes (OCDBT with zstd) and at its fastest settings (neither); both libraries load
both, from the disk and from the page cache, in turns and each in a fresh process, and plain loops read a
file of as many bytes. Compressed checkpoints are smaller than that file, and must be decompressed.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.analysis import Ratio, Results, Series
from benchmarks.command import measured, session_parser, wide_console
from benchmarks.plan import Selection

STATE = "llama"
OPERATIONS = ("load-cold", "load-warm")
# Ours, the peer, and how many times as fast ours is to be.
PAIRS = (("waystation-of-orbax", "orbax", 1.0), ("waystation-of-orbax-plain", "orbax-plain", 2.0))
LIMIT = "limit"
# The best from the disk and from the page cache.
LIMIT_WAYS = frozenset(
    {
        "threads direct 1 MiB x4",
        "ring direct 4 MiB x1 depth 8",
        "threads buffered 1 MiB x4",
        "threads buffered 8 MiB x4",
    }
)
TITLES = {"load-cold": "from the disk", "load-warm": "from the page cache"}


def main() -> None:
    parser = session_parser("benchmarks.orbax_formats_load", 3)
    parser.add_argument("--state", default=STATE, help=f"what is loaded (default: {STATE})")
    arguments = parser.parse_args()
    console = wide_console()
    systems = (LIMIT, *(name for ours, peer, _ in PAIRS for name in (ours, peer)))
    selection = Selection((arguments.state,), systems, ("save", *OPERATIONS), LIMIT_WAYS, OPERATIONS)
    document = measured(arguments, selection, "orbax-formats-load", console)
    show(Results(document), arguments.state, console)


def show(results: Results, state: str, console: Console) -> None:
    """Prints the table."""
    table = Table(
        title="Loads of Orbax's checkpoints: seconds at the median, speed over Orbax's [worst round]"
    )
    for heading in ("saved by", "load", "Waystation", "Orbax", "raw", "speed", "target", "reached", "of raw"):
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
            raw = results.best(state, LIMIT, operation, "loaded")
            speed = f"{ratio.median:.2f} [{ratio.worst:.2f}]"
            yield (
                peer,
                TITLES[operation],
                _seconds(mine),
                _seconds(theirs),
                _seconds(raw) if raw else "-",
                speed,
                f"{target:.1f}",
                reached,
                f"{Ratio.of(mine, raw).median:.2f}" if raw else "-",
            )


def _seconds(series: Series) -> str:
    return f"{series.median:.2f}"


if __name__ == "__main__":
    main()
