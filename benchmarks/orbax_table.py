"""`python -m benchmarks.orbax_table`: table 1 of the paper on Orbax, at the size of one machine.

The paper times saves (blocking and background) and loads of three sizes of Llama, 20 times each and in
isolation, and gives P50 [P90] and their ratios. Here the sizes are 0.55, 1.29 and 2.47 GB on a local
disk, everything is durable when the background part ends, loads are cold, and the systems are Orbax as
it comes, Orbax without OCDBT and compression, Waystation, and a plain loop that writes or reads as many
bytes, in turns and each in a fresh process. Nothing limits the blocking part: a save of JAX's arrays
needs no copy.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.analysis import Results, Series
from benchmarks.command import measured, session_parser, wide_console
from benchmarks.plan import Selection
from benchmarks.targets import JAX

SIZES = ("llama-half-gb", "llama-1gb", "llama")
PEERS = ("orbax", "orbax-plain")
LIMIT = "limit"

# The operation and metric of the systems, and those of the limit.
ROWS = (
    ("Save (blocking)", ("save-async", "blocking"), None),
    ("Save (background)", ("save-async", "background"), ("save", "durable")),
    ("Load (cold)", ("load-cold", "resident"), ("load-cold", "loaded")),
)
# The best of each direction on most disks; a session of all ways would take three times as long.
LIMIT_WAYS = frozenset(
    {
        "threads direct 8 MiB x1",
        "ring direct 4 MiB x1 depth 4",
        "threads direct 1 MiB x4",
        "ring direct 4 MiB x1 depth 8",
    }
)


def main() -> None:
    arguments = session_parser("benchmarks.orbax_table", 20).parse_args()
    console = wide_console()
    systems = (JAX, *PEERS, LIMIT)
    selection = Selection(
        SIZES, systems, ("save-async", "load-cold"), LIMIT_WAYS, limit_operations=("save", "load-cold")
    )
    show(Results(measured(arguments, selection, "orbax-table", console)), console)


def show(results: Results, console: Console) -> None:
    """Prints the table."""
    others = (*PEERS, LIMIT)
    table = Table(title="P50 [P90] in seconds; how many times faster Waystation is, at P50 [P90]")
    for heading in ("operation", "size", "Waystation", *others, *(f"against {other}" for other in others)):
        table.add_column(heading, justify="left" if heading in ("operation", "size") else "right")
    for title, measured_by, limited_by in ROWS:
        for state in SIZES:
            ours = results.best(state, JAX, *measured_by)
            theirs = [results.best(state, peer, *measured_by) for peer in PEERS]
            theirs.append(results.best(state, LIMIT, *limited_by) if limited_by else None)
            ratios = (_ratio(ours, series) for series in theirs)
            table.add_row(title, _size(results, state), _cell(ours), *map(_cell, theirs), *ratios)
        table.add_section()
    console.print(table)


def _cell(series: Series | None) -> str:
    if series is None:
        return "-"
    return f"{series.percentile(50):.3f} [{series.percentile(90):.3f}] n={len(series.values)}"


def _ratio(ours: Series | None, theirs: Series | None) -> str:
    if ours is None or theirs is None:
        return "-"
    middle, tail = (theirs.percentile(percent) / ours.percentile(percent) for percent in (50, 90))
    return f"{middle:.2f}x [{tail:.2f}x]"


def _size(results: Results, state: str) -> str:
    sizes = [
        run["state_bytes"] for run in results.document["runs"] if run["state"] == state and "arrays" in run
    ]
    return f"{sizes[0] / 1e9:.2f} GB" if sizes else state


if __name__ == "__main__":
    main()
