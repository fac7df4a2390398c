"""The tables on the terminal: every case of each experiment, the model of more replicas, and the targets."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.distributed import broadcast, disk, limits, readers, replicas, reshard, throttles
from benchmarks.distributed.models import TOPOLOGIES
from benchmarks.experiments import show_failures, targets_of
from benchmarks.report import format_bytes, show_machine, show_targets
from benchmarks.rounds import Case, Results, mean_and_deviation
from benchmarks.targets import Line

EXPERIMENTS = {module.NAME: module for module in (reshard, replicas, broadcast, readers, disk)}
TITLES = {
    reshard.NAME: "Loads over other meshes, cold and verified",
    replicas.NAME: "Saves of what every process holds",
    broadcast.NAME: "Loads of what every process needs, from a slow store",
    readers.NAME: "Loads of what every process needs, from an object store of few requests a second",
    disk.NAME: "Processes that save together, and the limit of their disk",
}
HEADINGS = (
    "state",
    "median, s",
    "mean ± deviation",
    "worst, s",
    "of the limit",
    "read / needed",
    "requests",
    "memory grows, MiB",
)
MIB = 1 << 20


def evaluate(results: Results) -> list[Line]:
    """The targets of all experiments that were run."""
    return targets_of(EXPERIMENTS, results)


def show(document: dict[str, Any], console: Console) -> list[Line]:
    """Prints everything; returns the targets."""
    results = Results(document)
    show_machine(document, console)
    if results.runs(experiment=replicas.NAME) or results.runs(experiment=broadcast.NAME):
        console.print(f"Throttled by the engine: {throttles.describe()}.", highlight=False)
    for name in EXPERIMENTS:
        cases = results.cases(name)
        if cases:
            _show_cases(name, cases, results, console)
    _show_model(results, console)
    _show_readers(results, console)
    show_failures(results, console)
    lines = evaluate(results)
    show_targets(lines, console)
    return lines


def _show_cases(name: str, cases: list[Case], results: Results, console: Console) -> None:
    table = Table(title=TITLES[name], title_justify="left", header_style="bold")
    for heading in ("on", "operation", "by"):
        table.add_column(heading)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    before = ""
    for case in sorted(cases, key=lambda case: (case.subject, case.operation)):
        series = results.series(case)
        if series is None:
            continue
        if before and before != case.subject:
            table.add_section()
        before = case.subject
        grown, size = results.series(case, "peak_growth_bytes"), results.series(case, "state_bytes")
        table.add_row(
            case.subject,
            case.operation,
            case.system,
            format_bytes(int(size.median)) if size else "",
            f"{series.median:.3f}",
            mean_and_deviation(list(series.values.values())),
            f"{series.worst:.3f}",
            _share_of_limit(case, results),
            _read_ratio(case, results),
            f"{requests.median:.0f}" if (requests := results.series(case, "requests")) else "",
            f"{grown.worst / MIB:,.0f}" if grown else "",
        )
    console.print(table)
    if name == reshard.NAME:
        for subject, topology in TOPOLOGIES.items():
            console.print(f"{subject}: {topology.source}; saved over {topology.origin}", highlight=False)
    console.print()


def _share_of_limit(case: Case, results: Results) -> str:
    share = (
        None if case.operation.endswith(reshard.WARM) else limits.share(results, case)
    )  # it is of cold reads
    return "" if share is None else f"{share:.2f}"


def _read_ratio(case: Case, results: Results) -> str:
    read, needed = results.series(case, "bytes_read"), results.series(case, "bytes_needed")
    return f"{read.median / needed.median:.3f}" if read and needed and needed.median else ""


def _show_model(results: Results, console: Console) -> None:
    models = broadcast.models_of(results)
    if not models:
        return
    title = "Load and broadcast, measured and modelled: mean ± deviation, s"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("replicas", "everyone reads", "modelled", "broadcast", "modelled", "modelled, x faster"):
        table.add_column(heading, justify="right")
    for count in broadcast.MODELLED:
        table.add_row(
            str(count),
            _measured(results, count, broadcast.EVERYONE),
            mean_and_deviation([model.everyone_s(count) for model in models]),
            _measured(results, count, broadcast.BROADCAST),
            mean_and_deviation([model.broadcast_s() for model in models]),
            f"{broadcast.speedup(models, count):.2f}x",
        )
    console.print(table)
    own = statistics.fmean(model.own_s for model in models)
    sending = statistics.fmean(model.sending_s for model in models)
    console.print(
        f"The model: the store's time for all that is read, {own:.2f} s of each load's own, and "
        f"{sending:.2f} s to send the state on, as measured at {broadcast.COUNTS[-1]} replicas, whatever "
        "their number.\n",
        highlight=False,
    )


def _show_readers(results: Results, console: Console) -> None:
    model = readers.model_of(results)
    if model is None:
        return
    title = f"A store of {readers.REQUESTS_PER_S} requests/s, modelled from the medians, s"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("readers", "everyone reads", "broadcast", "x faster"):
        table.add_column(heading, justify="right")
    for count in readers.MODELLED:
        read, sent = model.seconds(count, broadcast=False), model.seconds(count, broadcast=True)
        table.add_row(str(count), f"{read:.2f}", f"{sent:.2f}", f"{read / sent:.1f}x")
    console.print(table)
    console.print(
        f"The model: {model.alone_requests:.1f} requests of each reader, or {model.shared_requests:.1f} of "
        f"all and {model.own_requests:.1f} of each; {model.everyone_s:.2f} s and {model.broadcast_s:.2f} s "
        f"beyond the store's time, as measured by {readers.COUNTS[-1]}.\n",
        highlight=False,
    )


def _measured(results: Results, count: int, manner: str) -> str:
    series = results.series(Case(broadcast.NAME, broadcast.subject_of(count), manner, broadcast.OPERATION))
    return mean_and_deviation(list(series.values.values())) if series else ""
