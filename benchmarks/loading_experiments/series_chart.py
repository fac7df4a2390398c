"""The picture of the time series: a column for each loader, a row for each thing that the machine does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chart import OURS, plotter
from benchmarks.loading_experiments import series
from benchmarks.loading_experiments.sampler import Points, growth, rate
from benchmarks.processes import Outcome
from benchmarks.report import format_bytes
from benchmarks.rounds import Results

SECOND, GUIDE, TIME = "#d08c2e", "#c9ced6", "#8d99a6"
LABELS = {
    "waystation-safetensors-torch (read)": "Waystation (torch)",
    "waystation-safetensors-jax (read)": "Waystation (JAX)",
    "safetensors-torch (mmap)": "safetensors (torch), mapped",
    "safetensors-jax (mmap)": "safetensors (flax)",
    "fastsafetensors (direct)": "fastsafetensors",
    "runai": "Run:ai streamer",
}
BEFORE_S, BEHIND, ABOVE = 0.1, 1.05, 1.08
EVERY = 2
"""One of so many samples is drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    colour: str
    points: Points


def curves_of(run: Outcome) -> dict[str, list[Curve]]:
    """What is drawn of a run, by the titles of the rows."""
    cached = growth(run, "cached_bytes")
    anonymous, mapped = growth(run, "anonymous_bytes"), growth(run, "mapped_bytes")
    return {
        "cores busy": [Curve("", OURS, rate(run, "cpu_s"))],
        "disk, GB/s": [Curve("", OURS, _scaled(rate(run, "disk_read_bytes"), 1e-9))],
        "page cache, GB": [Curve("", OURS, _scaled(cached, 1e-9))],
        "memory, GB": [
            Curve("of its own", OURS, _scaled(anonymous, 1e-9)),
            Curve("mapped files", SECOND, _scaled(mapped, 1e-9)),
        ],
    }


def _scaled(points: Points, factor: float) -> Points:
    return points[0], [value * factor for value in points[1]]


def draw(document: dict[str, Any], path: Path) -> None:
    """Draws the median run of each loader; the suffix of `path` decides the format."""
    pyplot = plotter()
    results = Results(document)
    drawn = [(loading, run) for loading in series.LOADINGS if (run := series.median_run(results, loading))]
    if not drawn:
        raise SystemExit("there is nothing to draw: measure the experiment series")
    columns = [curves_of(run) for _, run in drawn]
    titles = list(columns[0])
    figure, cells = pyplot.subplots(
        len(titles), len(drawn), figsize=(2.5 * len(drawn), 7.4), squeeze=False, sharex=True, sharey="row"
    )
    for column, ((loading, run), curves) in enumerate(zip(drawn, columns, strict=True)):
        cells[0][column].set_title(
            f"{LABELS[loading.system]}\n{run['seconds']:.2f} s", fontsize=9, loc="left"
        )
        for row, title in enumerate(titles):
            _draw_cell(cells[row][column], curves[title], run["seconds"])
    for row, title in enumerate(titles):
        cells[row][0].set_ylabel(title, fontsize=8.5)
        cells[row][0].set_ylim(0, ABOVE * max(_highest(curves[title]) for curves in columns))
    for axes in cells[-1]:
        axes.set_xlabel("s", fontsize=8)
    cells[-1][0].legend(fontsize=7, frameon=False, loc="upper left")
    longest = max(run["seconds"] for _, run in drawn)
    cells[0][0].set_xlim(-BEFORE_S, longest * BEHIND)
    figure.text(0.01, 0.008, _caption(document, drawn[0][1]), fontsize=7.5, color="#555555")
    figure.tight_layout(rect=(0, 0.045, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _highest(curves: list[Curve]) -> float:
    return max((value for curve in curves for value in curve.points[1]), default=0.0)


def _draw_cell(axes: Any, curves: list[Curve], seconds: float) -> None:
    for curve in curves:
        times, values = (numbers[::EVERY] for numbers in curve.points)
        axes.plot(times, values, color=curve.colour, linewidth=1.1, label=curve.label)
        axes.fill_between(times, values, color=curve.colour, alpha=0.15, linewidth=0)
    axes.axvline(seconds, color=TIME, linewidth=0.8, linestyle=":")
    axes.tick_params(labelsize=7.5)
    axes.grid(color=GUIDE, linewidth=0.4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _caption(document: dict[str, Any], run: Outcome) -> str:
    machine = document["machine"]
    rounds = 1 + max(found["round"] for found in document["runs"] if found["experiment"] == series.NAME)
    return (
        f"A cold load of {format_bytes(run['state_bytes'])} onto the CPU, one process; the median of {rounds}"
        " runs, up to the dotted line, with every page of mapped tensors touched. Processor, disk and page "
        "cache are the machine's, memory is the process's.\n"
        f"{machine['cores']} cores of {machine['processor']}, {machine['file_system']}. Made by "
        "`python -m benchmarks.loading_experiments --experiments series --charts DIRECTORY`."
    )
