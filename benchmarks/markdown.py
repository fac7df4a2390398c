"""The tables of `docs/benchmarks.md`: systems by times, medians and the worst runs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.analysis import Results, Series, is_mapped
from benchmarks.systems import SYSTEMS

COLUMNS = {
    "save": ("save", "durable"),
    "save-async, blocked": ("save-async", "blocking"),
    "save-async, to its end": ("save-async", "durable"),
    "load, cold": ("load-cold", "resident"),
    "load, warm": ("load-warm", "resident"),
}
"""The operation and the metric of each."""


def lines(results: Results, state: str) -> Iterator[str]:
    """The lines of the table of a state, in seconds; of a system's ways, the best in each column, those
    that map files apart."""
    present = {operation for of_state, _, operation, _ in results.runs if of_state == state}
    columns = {heading: names for heading, names in COLUMNS.items() if names[0] in present}
    yield f"| {' | '.join(('s', *columns))} |"
    yield f"|---|{'---:|' * len(columns)}"
    for system in SYSTEMS:
        for mapped in (False, True):
            found = [_best(results, state, system, *names, mapped=mapped) for names in columns.values()]
            if any(found):
                cells = ["" if one is None else f"{one.median:.2f} ({one.worst:.2f})" for one in found]
                name = f"`{system}`, mapped" if mapped else f"`{system}`"
                yield f"| {' | '.join((name, *cells))} |"


def _best(
    results: Results, state: str, system: str, operation: str, metric: str, *, mapped: bool
) -> Series | None:
    ways = {way for _, name, _, way in results.runs if name == system and is_mapped(system, way) == mapped}
    return results.best(state, system, operation, metric, ways)
