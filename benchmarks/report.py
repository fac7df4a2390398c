"""The tables on the terminal: every system in every operation, what is missing, and the targets."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.analysis import LOADS, MAIN_METRICS, Ratio, Results, Series
from benchmarks.systems import SYSTEMS
from benchmarks.targets import JAX, NATIVE, Line, Standard

TITLES = {
    "save": "Save",
    "save-async": "Asynchronous save",
    "load-cold": "Load, cold",
    "load-warm": "Load, warm",
    "stream-cold": "One array after another, cold",
    "stream-warm": "One array after another, warm",
    "copy": "Plain copy of the state into untouched memory",
}
TIMES = {
    "save": ("returned", "durable"),
    "save-async": ("blocking", "returned", "durable"),
    "load-cold": ("loaded", "touched"),
    "load-warm": ("loaded", "touched"),
    "stream-cold": ("first", "loaded", "touched"),
    "stream-warm": ("first", "loaded", "touched"),
    "copy": ("copied",),
}
HEADINGS = (
    "worst, s",
    "GB/s",
    "x limit",
    "Waystation, x faster",
    "memory above, MiB",
    "mapped, MiB",
    "CPU, s",
)
LOAD_HEADINGS = ("cached, MiB", "from disk, MiB")
LIMIT_OPERATIONS = {"save-async": "copy", "stream-cold": "load-cold", "stream-warm": "load-warm"}
"""What of the limit an operation is held against, where it is another one."""
MIB = 1 << 20


def show(document: dict[str, Any], console: Console, standard: Standard = NATIVE) -> list[Line]:
    """Prints everything; returns the targets."""
    results = Results(document)
    lines = standard.evaluate(results)
    show_machine(document, console)
    for state in results.states():
        for operation in TITLES:
            table = _table(results, state, operation, standard)
            if table is not None:
                console.print(table, "")
    _show_failures(results, console)
    show_targets(lines, console)
    return lines


def show_machine(document: dict[str, Any], console: Console) -> None:
    """Prints what the figures were measured on."""
    machine = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    console.print(
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['file_system']}, Linux {machine['kernel']}; Python {machine['python']}, {packages}",
        highlight=False,
    )
    if not machine["page_cache_can_be_dropped"]:
        console.print(
            "The page cache cannot be dropped here: cold loads only ask the kernel to forget files."
        )
    if document.get("memory") == "unused":
        console.print(
            "Nobody had used free memory lately: the first touch of memory is a part of every figure."
        )
    if document["quick"]:
        console.print("Quick states: these figures show that everything works, not how fast it is.")


def _table(results: Results, state: str, operation: str, standard: Standard) -> Table | None:
    """All systems in one operation on one state, ways of the limit reduced to the best."""
    rows = _rows(results, state, operation)
    if not rows:
        return None
    sample = results.runs[state, rows[0].system, operation, rows[0].way][0]
    title = (
        f"{TITLES[operation]}: {state}, {sample['arrays']:,} arrays, {format_bytes(sample['state_bytes'])}"
    )
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("system", no_wrap=True)
    for time in TIMES[operation]:
        table.add_column(f"{time}, s", justify="right")
    for heading in (*HEADINGS, *(LOAD_HEADINGS if operation.startswith(LOADS) else ())):
        table.add_column(heading, justify="right")
    for series in rows:
        ours = _opponent(results, state, operation, series, standard)
        table.add_row(*_cells(results, state, operation, series, ours, sample["state_bytes"]))
    return table


def _rows(results: Results, state: str, operation: str) -> list[Series]:
    metric = MAIN_METRICS[operation]
    rows: list[Series] = []
    for system in SYSTEMS:
        if system == "limit":
            best = results.best(state, system, operation, metric)
            rows += [best] if best else []
            continue
        keys = [key for key in results.runs if key[:3] == (state, system, operation)]
        rows += [series for key in keys if (series := results.series(*key, metric))]
    return rows


def _cells(
    results: Results, state: str, operation: str, series: Series, ours: Series | None, state_bytes: int
) -> list[str]:
    key = state, series.system, operation, series.way
    syncs = SYSTEMS[series.system].syncs
    name = series.system if series.way == "default" else f"{series.system} ({series.way})"
    name = f"{name} *" if operation.startswith("save") and not syncs else name
    times = [results.series(*key, metric) for metric in TIMES[operation]]
    caching = ("cache_growth_bytes", "disk_read_bytes") if operation.startswith(LOADS) else ()
    limit = results.best(state, "limit", LIMIT_OPERATIONS.get(operation, operation))
    return [
        name,
        *(f"{time.median:.3f}" if time else "" for time in times),
        f"{series.worst:.3f}",
        "" if operation == "save-async" else f"{state_bytes / series.median / 1e9:.2f}",
        f"{limit.median / series.median:.2f}" if limit else "",
        f"{Ratio.of(ours, series).median:.1f}x" if ours else "",
        *(_mebibytes(results.series(*key, metric)) for metric in ("memory_above", "mapped_growth_bytes")),
        _median(results.series(*key, "cpu_s"), ".2f"),
        *(_mebibytes(results.series(*key, metric)) for metric in caching),
    ]


def _opponent(
    results: Results, state: str, operation: str, series: Series, standard: Standard
) -> Series | None:
    """What a peer is compared with; Waystation itself is not compared."""
    if series.system.startswith(JAX):
        return None
    return results.best_alike(state, standard.opponent(series.system), operation, series)


def _mebibytes(series: Series | None) -> str:
    return f"{max(0.0, series.worst) / MIB:,.0f}" if series else ""


def _median(series: Series | None, form: str) -> str:
    return format(series.median, form) if series else ""


def format_bytes(count: int) -> str:
    """A size for people, in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _show_failures(results: Results, console: Console) -> None:
    for (system, status, reason), runs in results.failures().items():
        style = "yellow" if status == "missing" else "red"
        operations = ", ".join(dict.fromkeys(f"{run['operation']} of {run['state']}" for run in runs))
        console.print(Text(f"{status}: {system}, {len(runs)} runs ({operations}): {reason}", style=style))


def show_targets(lines: list[Line], console: Console) -> None:
    """Prints the table of targets."""
    table = Table(title="Targets", title_justify="left", header_style="bold")
    for heading in ("target", "needed", "median", "worst round", "reached"):
        table.add_column(heading, justify="left" if heading in ("target", "reached") else "right")
    for line in lines:
        verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]not measured[/]"}[line.reached]
        measured = "" if line.reached is None else line.measured
        table.add_row(line.text, line.needed, measured, line.worst, verdict)
    console.print(table)
