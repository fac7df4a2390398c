"""The tables on the terminal: what every system does in a second, and the targets."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.experiments import targets_of
from benchmarks.report import show_machine, show_targets
from benchmarks.rounds import Case, Results, mean_and_deviation
from benchmarks.runtime import dispatch, hiding, pipeline, tenants, training
from benchmarks.runtime.request import Experiment
from benchmarks.targets import Line

EXPERIMENTS: dict[str, Experiment] = {
    module.NAME: module for module in (dispatch, hiding, pipeline, tenants, training)
}


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
            _show_cases(module, cases, results, console)
    for run in document["runs"]:
        if run["status"] != "ok":
            what = f"{run['status']}: {run['experiment']}: {run['subject']}: {run['reason']}"
            console.print(Text(what, style="red"))
    lines = evaluate(results)
    show_targets(lines, console)
    return lines


def _show_cases(module: Experiment, cases: list[Case], results: Results, console: Console) -> None:
    table = Table(title=module.TITLE, title_justify="left", header_style="bold")
    for heading in ("on", "operation", "by"):
        table.add_column(heading)
    for heading in ("in a second, median", "slowest", "each, µs: mean ± deviation"):
        table.add_column(heading, justify="right")
    before = ""
    subjects = list(dict.fromkeys(case.subject for case in cases))
    for case in sorted(cases, key=lambda case: subjects.index(case.subject)):
        series = results.series(case)
        if series is None:
            continue
        if before and before != case.subject:
            table.add_section()
        before = case.subject
        table.add_row(
            case.subject,
            case.operation,
            case.system,
            f"{1 / series.median:,.0f}",
            f"{1 / series.worst:,.0f}",
            mean_and_deviation([seconds * 1e6 for seconds in series.values.values()]),
        )
    console.print(table)
    for remark in module.remarks(results):
        console.print(remark, highlight=False)
    console.print()
