"""The tables on the terminal: every case of each experiment, and the targets."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.distributed import limits
from benchmarks.experiments import show_failures, targets_of
from benchmarks.loading_experiments import beside_copies, in_memory, scaling, series
from benchmarks.report import format_bytes, show_machine, show_targets
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line

EXPERIMENTS = {module.NAME: module for module in (scaling, in_memory, beside_copies, series)}
HEADINGS = (
    "files",
    "median",
    "worst",
    "GB/s",
    "of limit",
    "read",
    "CPU",
    "memory, MiB",
    "its speed",
    "jobs' speed",
)
MIB = 1 << 20


def evaluate(results: Results) -> list[Line]:
    """The targets of all experiments that were run."""
    return targets_of(EXPERIMENTS, results)


def show(document: dict[str, Any], console: Console) -> list[Line]:
    """Prints everything; returns the targets."""
    results = Results(document)
    show_machine(document, console)
    for name, module in EXPERIMENTS.items():
        cases = results.cases(name)
        if cases:
            console.print(_table(module.TITLE, cases, results), "")
    show_failures(results, console)
    lines = evaluate(results)
    show_targets(lines, console)
    return lines


def _table(title: str, cases: list[Case], results: Results) -> Table:
    """All cases of an experiment; of the limit the best way, and no column that is empty."""
    rows = [
        (case, cells)
        for case in sorted(cases, key=lambda case: (case.subject, case.operation))
        if _is_shown(case, results) and (cells := _cells(case, results))
    ]
    used = [number for number in range(len(HEADINGS)) if any(cells[number] for _, cells in rows)]
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("on", "operation", "by"):
        table.add_column(heading, no_wrap=True)
    for number in used:
        table.add_column(HEADINGS[number], justify="right")
    before = None
    for case, cells in rows:
        if before not in (None, (case.subject, case.operation)):
            table.add_section()
        before = (case.subject, case.operation)
        table.add_row(case.subject, case.operation, case.system, *(cells[number] for number in used))
    return table


def _is_shown(case: Case, results: Results) -> bool:
    if not case.system.startswith(limits.PREFIX):
        return True
    best = limits.best(results, case.experiment)
    return best is not None and best.system == case.system


def _cells(case: Case, results: Results) -> list[str] | None:
    """In the order of `HEADINGS`; None if nothing went well."""
    seconds, size = results.series(case), results.series(case, "state_bytes")
    if seconds is None:
        return None
    share = limits.share(results, case) if size is not None else None
    read = (
        scaling.read_ratio(results, case) if size is not None and case.experiment != in_memory.NAME else None
    )
    processor, grown = results.series(case, "cpu_s"), results.series(case, "peak_growth_bytes")
    is_beside = case.experiment == beside_copies.NAME
    kept = beside_copies.kept_share(results, case) if is_beside and size is not None else None
    jobs = beside_copies.jobs_share(results, case) if is_beside and size is not None else None
    return [
        format_bytes(int(size.median)) if size else "",
        f"{seconds.median:.3f}",
        f"{seconds.worst:.3f}",
        f"{size.median / seconds.median / 1e9:.2f}" if size else "",
        _shown(share),
        f"{read[0]:.2f}" if read else "",
        f"{processor.median:.2f}" if processor else "",
        f"{grown.median / MIB:,.0f}" if grown else "",
        _shown(kept),
        _shown(jobs),
    ]


def _shown(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"
