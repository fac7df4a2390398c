"""The picture of several processes, and of jobs beside: seconds of a load, of each library at its best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import states
from benchmarks.chart import LIMIT, OURS, plotter
from benchmarks.distributed import limits
from benchmarks.loading_experiments import beside_copies, scaling
from benchmarks.loading_experiments.models import QUARTERS, Model
from benchmarks.loading_experiments.session import Loading, best
from benchmarks.report import format_bytes
from benchmarks.rounds import Case, Results

GUIDE = "#c9ced6"
CaseOf = Callable[[Loading, int], Case]


@dataclass(frozen=True, slots=True)
class Line:
    """A library in its ways; the one with the best median counts at each point."""

    label: str
    colour: str
    style: str
    ways: Sequence[Loading]


LINES = (
    Line("Waystation (torch)", OURS, "-", (scaling.OURS,)),
    Line("fastsafetensors", "#d08c2e", "-", scaling.PEERS["fastsafetensors"]),
    Line("Run:ai streamer", "#7a5195", "-", scaling.PEERS["runai"]),
    Line("safetensors (torch), read", "#5a6570", "-", scaling.PEERS["safetensors, read"]),
    Line("safetensors (torch), mapped", "#5a6570", ":", (scaling.MAPPED,)),
    Line("Waystation (JAX)", OURS, "--", (scaling.OURS_JAX,)),
    Line("safetensors (flax)", "#5a6570", "--", scaling.JAX_PEERS["safetensors.flax"]),
)


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    axis: str
    points: Sequence[int]
    case_of: CaseOf


def _strong(wanted: str) -> CaseOf:
    return lambda loading, processes: scaling.case_of(
        loading, QUARTERS, processes, scaling.WHOLE if scaling.is_everything(loading, processes) else wanted
    )


PANELS = (
    Panel("Everything in each process", "processes", scaling.COUNTS, _strong(scaling.WHOLE)),
    Panel("A block in each process", "processes", scaling.COUNTS, _strong(scaling.BLOCKS)),
    Panel("Beside jobs that copy memory", "jobs", beside_copies.JOBS, beside_copies.case_of),
)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draws the medians; the suffix of `path` decides the format."""
    pyplot = plotter()
    results = Results(document)
    figure, cells = pyplot.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 4.1), squeeze=False)
    drawn = [_draw_panel(axes, results, panel) for axes, panel in zip(cells[0], PANELS, strict=True)]
    if not any(drawn):
        raise SystemExit("there is nothing to draw: measure the experiments scaling and beside-copies")
    figure.text(0.01, 0.01, _caption(document), fontsize=7.5, color="#555555")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_panel(axes: Any, results: Results, panel: Panel) -> bool:
    drawn = False
    for line in LINES:
        found = [(count, _seconds(results, panel, line, count)) for count in panel.points]
        known = [(count, seconds) for count, seconds in found if seconds is not None]
        if len(known) > 1:
            counts, seconds = zip(*known, strict=True)
            axes.plot(
                counts, seconds, line.style, color=line.colour, label=line.label, marker="o", markersize=3
            )
            drawn = True
    limit_s = _limit_seconds(results)
    if drawn and limit_s is not None:
        axes.axhline(limit_s, color=LIMIT, linewidth=0.8, linestyle=":", label="raw reads, no arrays")
    if drawn:
        axes.legend(fontsize=7, frameon=False, handlelength=3.2)
    axes.set_xticks(panel.points)
    axes.set_ylim(bottom=0)
    axes.set_title(f"{panel.title} (s)", fontsize=10, loc="left")
    axes.set_xlabel(panel.axis, fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(color=GUIDE, linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return drawn


def _seconds(results: Results, panel: Panel, line: Line, count: int) -> float | None:
    series = best(results, panel.case_of(line.ways[0], count), line.ways)
    return series.median if series else None


def _model_bytes(document: dict[str, Any]) -> int:
    return Model(scaling.STATE, bool(document.get("quick"))).nbytes


def _limit_seconds(results: Results) -> float | None:
    """How long the raw limit would take for as many bytes."""
    limit = limits.best(results, scaling.NAME)
    if limit is None:
        return None
    raw_bytes = states.total_bytes(states.describe(limits.STATE, bool(results.document.get("quick"))))
    return limit.median * _model_bytes(results.document) / raw_bytes


def _caption(document: dict[str, Any]) -> str:
    machine = document["machine"]
    drawn = [run for run in document["runs"] if run["experiment"] in (scaling.NAME, beside_copies.NAME)]
    rounds = 1 + max(run["round"] for run in drawn)
    return (
        f"Cold loads of {format_bytes(_model_bytes(document))} onto the CPU, shorter is better; rounds: "
        f"{rounds}; each library in its best way. Processes are of one machine: "
        f"{machine['cores']} cores of {machine['processor']}, {machine['file_system']}.\n"
        "Mapped tensors are counted with every page touched, and processes share their pages. "
        "Made by `python -m benchmarks.loading_experiments --charts DIRECTORY`."
    )
