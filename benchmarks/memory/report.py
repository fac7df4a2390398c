"""The tables on the terminal: saves and recoveries, their limits, training, and the targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.analysis import Ratio, Series
from benchmarks.memory import checkpoints, hosts, replication, training, training_process
from benchmarks.memory.checkpoints import INTO, INTO_WARM, LIMIT, RECOVER, RECOVER_WARM, SAVE
from benchmarks.memory.targets import BASELINE, evaluate
from benchmarks.report import format_bytes, show_machine, show_targets
from benchmarks.rounds import Case, Results, mean_and_deviation
from benchmarks.targets import Line


def show(document: dict[str, Any], console: Console) -> list[Line]:
    """Prints everything; returns the targets."""
    results = Results(document)
    show_machine(document, console)
    for framework in checkpoints.OURS:
        if results.runs(experiment=checkpoints.NAME, subject=framework):
            console.print(_saves(results, framework), _recoveries(results, framework))
    if results.runs(experiment=checkpoints.NAME, subject=LIMIT):
        console.print(_limits(results))
    for subject in dict.fromkeys(run["subject"] for run in results.runs(experiment=replication.NAME)):
        console.print(_replication(results, subject))
    if results.runs(experiment=training.NAME):
        console.print(_training(results))
    _show_failures(results, console)
    lines = evaluate(results)
    show_targets(lines, console)
    return lines


def _saves(results: Results, framework: str) -> Table:
    cases = _cases(results, framework, SAVE)
    table = _table(
        f"Saves of one host, {framework}, {_size(results, cases)}",
        "to|s|worst, s|GB/s|program blocked, s|CPU, s per GB|torch-save takes",
    )
    for case in cases:
        series = results.series(case)
        if series is None:
            continue
        blocked = results.series(case, "blocked_s")
        table.add_row(
            case.system,
            *_times(series),
            f"{_rate(results, case):.2f}",
            mean_and_deviation(list(blocked.values.values())) if blocked else "",
            _cpu(results, case),
            _against(results, series, SAVE),
        )
    return table


def _recoveries(results: Results, framework: str) -> Table:
    operations = (RECOVER, RECOVER_WARM, INTO, INTO_WARM)
    cases = [case for operation in operations for case in _cases(results, framework, operation)]
    table = _table(
        f"Recoveries of one host, {framework}, {_size(results, cases)}; the start of a process apart",
        "from|files cached|to|s|worst, s|GB/s|start of the process, s|CPU, s per GB|torch-save takes",
    )
    for case in cases:
        series = results.series(case)
        if series is None:
            continue
        start = results.series(case, "import_s")
        table.add_row(
            case.system,
            "yes" if case.operation in (RECOVER_WARM, INTO_WARM) else "",
            "the program's" if case.operation in (INTO, INTO_WARM) else "new",
            *_times(series),
            f"{_rate(results, case):.2f}",
            f"{start.median:.2f}" if start else "",
            _cpu(results, case),
            _against(results, series, case.operation),
        )
    return table


def _limits(results: Results) -> Table:
    table = _table("Limits: plain loops over as many bytes", "what|how|s|worst, s|GB/s")
    for case in results.cases(checkpoints.NAME):
        series = results.series(case)
        if case.subject == LIMIT and series is not None:
            table.add_row(case.operation, case.system, *_times(series), f"{_rate(results, case):.2f}")
    return table


def _replication(results: Results, subject: str) -> Table:
    cases = [case for case in results.cases(replication.NAME) if case.subject == subject]
    table = _table(
        f"A program on {subject} of this machine, {hosts.COPIES} copies of each shard, jax, "
        f"{_size(results, cases)}",
        "what|where|s|worst, s|GB/s|program blocked, s|CPU, s per GB|torch-save takes, one process",
    )
    for case in sorted(
        cases, key=lambda case: (case.operation != SAVE, replication.SYSTEMS.index(case.system))
    ):
        series = results.series(case)
        if series is None:
            continue
        blocked = results.series(case, "blocked_s")
        table.add_row(
            case.operation,
            case.system,
            *_times(series),
            f"{_rate(results, case):.2f}",
            mean_and_deviation(list(blocked.values.values())) if blocked else "",
            _cpu(results, case),
            _against(results, series, case.operation),
        )
    return table


def _training(results: Results) -> Table:
    table = _table(
        "Training with saves",
        "framework|state|saves to|how often|iterations/s|of those without saves|blocked|a save blocks, s"
        "|CPU, s per GB saved",
    )
    for case in results.cases(training.NAME):
        rate = results.series(case, "iterations_per_s")
        share, size = results.series(case, "blocked_share"), results.series(case, "state_bytes")
        if rate is None or share is None or size is None:
            continue
        plain = results.series(
            Case(training.NAME, case.subject, training_process.NOWHERE, training.NO_SAVES), "iterations_per_s"
        )
        table.add_row(
            case.subject,
            format_bytes(int(size.median)),
            case.system,
            case.operation,
            mean_and_deviation(list(rate.values.values())),
            f"{rate.median / plain.median:.1%}" if plain else "",
            f"{share.median:.1%}",
            _blocked_by_one(results, case),
            _cpu_of_saving(results, case),
        )
    return table


# ---- cells -------------------------------------------------------------------------------------


def _table(title: str, headings: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    words = ("to", "where", "from", "what", "how", "framework", "saves to", "how often", "files cached")
    for heading in headings.split("|"):
        table.add_column(heading, justify="left" if heading in words else "right")
    return table


def _cases(results: Results, framework: str, operation: str) -> list[Case]:
    found = [case for case in results.cases(checkpoints.NAME) if case.operation == operation]
    known = [*checkpoints.ON_DISK[framework], checkpoints.STORE, checkpoints.MEMORY, checkpoints.FIRST]
    own = [case for case in found if case.subject == framework and case.system in known]
    return sorted(own, key=lambda case: known.index(case.system))


def _size(results: Results, cases: list[Case]) -> str:
    sizes = [size for case in cases if (size := results.series(case, "state_bytes"))]
    return format_bytes(int(sizes[0].median)) if sizes else "nothing"


def _times(series: Series) -> tuple[str, str]:
    return mean_and_deviation(list(series.values.values())), f"{series.worst:.3f}"


def _rate(results: Results, case: Case) -> float:
    """GB a second."""
    seconds, size = results.series(case), results.series(case, "state_bytes")
    assert seconds is not None, "only what was measured has a row"
    return size.median / seconds.median / 1e9 if size else 0.0


def _cpu(results: Results, case: Case) -> str:
    series = results.series(case, "cpu_s_per_gb")
    return f"{series.median:.2f}" if series else ""


def _against(results: Results, series: Series, operation: str) -> str:
    """How many times as long the baseline takes."""
    baseline = results.series(replace(BASELINE, operation=operation))
    return f"{Ratio.of(series, baseline).median:.2f} x" if baseline else ""


def _blocked_by_one(results: Results, case: Case) -> str:
    blocked, saves = results.series(case, "blocked_s"), results.series(case, "saves")
    return f"{blocked.median / saves.median:.3f}" if blocked and saves and saves.median else ""


def _cpu_of_saving(results: Results, case: Case) -> str:
    """What the runs took beyond those that saved nothing."""
    plain = replace(case, system=training_process.NOWHERE, operation=training.NO_SAVES)
    own, without = results.series(case, "cpu_s"), results.series(plain, "cpu_s")
    agent, saves = results.series(case, "agent_cpu_s"), results.series(case, "saves")
    size = results.series(case, "state_bytes")
    if not (own and without and agent and saves and size and saves.median):
        return ""
    added_s = own.median - without.median + agent.median
    return f"{added_s / (saves.median * size.median / 1e9):.2f}"


def _show_failures(results: Results, console: Console) -> None:
    for run in results.document["runs"]:
        if run["status"] != "ok":
            case = Case(*(run[name] for name in Case.__slots__))
            style = "yellow" if run["status"] == "missing" else "red"
            console.print(Text(f"{run['status']}: {case}: {run['reason']}", style=style))
