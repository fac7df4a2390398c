"""What `python -m benchmarks.startup` prints: when each stage was reached, and who is how much faster.

Where weights are mapped, loading reads nothing yet and the first token waits for the disk, so loaders are
compared with Waystation's load that ends as theirs does, and by the first token rather than by the load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.analysis import Ratio, Series
from benchmarks.processes import Outcome
from benchmarks.report import format_bytes, show_machine, show_targets
from benchmarks.rounds import Case, Results
from benchmarks.startup_servers import SERVERS, TRANSFORMERS, Server
from benchmarks.systems.limit import Limit
from benchmarks.targets import EVEN, Line

LOAD, FIRST, LAST = "load_s", "first_s", "last_s"
AFTER_IMPORTS = "imported_to_first_s"
STAGES = {
    "imported_s": "imports, s",
    "skeleton_s": "skeleton, s",
    "loaded_s": "weights, s",
    FIRST: "first token, s",
}


def one_line(case: Case, outcome: Outcome) -> str:
    """A run, for who waits."""
    name = f"{case.system} ({case.operation}), {case.subject}"
    if outcome["status"] != "ok":
        return f"{name}: {outcome['status']}: {outcome['reason'].splitlines()[0]}"
    shown = f"{name}: load {outcome[LOAD]:.3f} s"
    return f"{shown}, first token after {outcome[FIRST]:.3f} s" if FIRST in outcome else shown


def show(document: dict[str, Any], console: Console) -> None:
    """Prints the tables, what is missing, and the targets."""
    results = Results(document)
    show_machine(document, console)
    model = document["model"]
    size, versions = format_bytes(model["bytes"]), model.get("versions", {})
    by = ", ".join(f"{name} {version}" for name, version in versions.items()) or _server(results).name
    console.print(f"A Llama of {size} in bfloat16, in several files, run by {by}.", highlight=False)
    for cache in dict.fromkeys(run["subject"] for run in document["runs"]):
        console.print(_table(results, cache), "")
    _show_gaps(results, console)
    show_targets(list(evaluate(results)), console)


def _server(results: Results) -> Server:
    """Who ran the model; documents without a word of that are of transformers."""
    return SERVERS[results.document.get("server", TRANSFORMERS)]


def _table(results: Results, cache: str) -> Table:
    tokens, loaders = results.document["tokens"], _server(results).loaders
    table = Table(
        title=f"From the start of a process, {cache}: seconds until … (medians)", title_justify="left"
    )
    headings = [*STAGES.values(), f"{tokens}th token, s", "worst, s", "load alone, s", "x limit"]
    headings += ["load: Waystation, x faster", "imports to first token: x faster", "a token, ms"]
    table.add_column("weights by")
    for heading in headings:
        table.add_column(heading, justify="right")
    limit = best_limit(results, cache)
    for case in _cases(results, cache):
        last = results.series(case, LAST)
        if last is None:
            continue
        load, token = results.series(case, LOAD), results.series(case, "token_s")
        ours = alike(results, case)
        stages = (results.series(case, metric) for metric in STAGES)
        is_read = case.operation not in loaders[case.system].mapped_ways
        table.add_row(
            _name(case),
            *(f"{stage.median:.2f}" if stage else "" for stage in stages),
            f"{last.median:.2f}",
            f"{last.worst:.2f}",
            f"{load.median:.3f}" if load else "",
            f"{limit.median / load.median:.2f}" if load and limit and is_read else "",
            *(_ratio(results, ours, case, metric) for metric in (LOAD, AFTER_IMPORTS)),
            f"{token.median * 1000:.1f}" if token else "",
        )
    if limit is not None:
        blanks = [""] * (len(STAGES) + 2)
        table.add_row(f"limit ({limit.way})", *blanks, f"{limit.median:.3f}", "1.00", "", "", "")
    return table


def _cases(results: Results, cache: str) -> list[Case]:
    found = [Case(*(run[name] for name in Case.__slots__)) for run in results.runs(subject=cache)]
    known = [*_server(results).loaders]
    loads = {case for case in found if case.system in known}
    return sorted(loads, key=lambda case: (known.index(case.system), case.operation))


def _name(case: Case) -> str:
    return case.system if case.operation == "default" else f"{case.system} ({case.operation})"


def _ratio(results: Results, ours: Case | None, theirs: Case, metric: str) -> str:
    mine = results.series(ours, metric) if ours else None
    other = results.series(theirs, metric)
    return f"{Ratio.of(mine, other).median:.2f}x" if mine and other else ""


# ---- what is compared with what ----------------------------------------------------------------


def best_limit(results: Results, cache: str) -> Series | None:
    """The way of the raw limit with the best median."""
    cases = {Case(*(run[name] for name in Case.__slots__)) for run in results.runs(subject=cache)}
    every = [results.series(case, LOAD) for case in cases if case.system == Limit.name]
    found = [series for series in every if series is not None]
    return min(found, key=lambda series: series.median, default=None)


def alike(results: Results, peer: Case) -> Case | None:
    """Waystation's own load that ends as a peer's does: with mapped weights, or in memory; None for ours."""
    server = _server(results)
    loader = server.loaders[peer.system]
    if loader.is_ours:
        return None
    is_mapped = peer.operation in loader.mapped_ways
    ours = server.loaders[server.ours]
    way = next(way for way in ours.ways if (way in ours.mapped_ways) == is_mapped)
    return Case(peer.experiment, peer.subject, server.ours, way)


def evaluate(results: Results) -> Iterator[Line]:
    """The targets: no peer's first token comes earlier, and a cold load is one at the speed of the disk."""
    for cache in dict.fromkeys(run["subject"] for run in results.document["runs"]):
        for peer in _cases(results, cache):
            ours = alike(results, peer)
            mine = results.series(ours, AFTER_IMPORTS) if ours else None
            theirs = results.series(peer, AFTER_IMPORTS)
            if mine and theirs:
                text = f"{cache}, imports to first token: no later than {_name(peer)}"
                yield _line(text, mine, theirs, EVEN)
    limit = best_limit(results, "cold")
    # Of those who run a model, only some take the memory that was read; others copy what a loader hands them.
    mine = results.series(Case("startup", "cold", _server(results).ours, "read"), LOAD)
    if limit and mine:
        yield _line("cold, load of the weights: of the raw read limit", mine, limit, 0.85)


def _line(text: str, ours: Series, theirs: Series, factor: float) -> Line:
    ratio = Ratio.of(ours, theirs)
    shown = f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x"
    return Line(text, f"≥ {factor:g}x", *shown, ratio.median >= factor)


def _show_gaps(results: Results, console: Console) -> None:
    gaps = {
        (run["system"], run["operation"], run["status"], run["reason"].splitlines()[0])
        for run in results.document["runs"]
        if run["status"] != "ok"
    }
    for system, way, status, reason in sorted(gaps):
        style = "yellow" if status == "missing" else "red"
        console.print(Text(f"{status}: {system} ({way}): {reason}", style=style))
    cached = [run.get("cached_bytes", 0) for run in results.runs(subject="cold")]
    most = max(cached, default=0)
    if most > results.document["model"]["bytes"] // 20:
        console.print(
            f"[yellow]Cold starts found up to {format_bytes(most)} of the model in the page cache: this file "
            "system does not follow the advice to forget files.[/]"
        )
