"""The bar charts of README and guides: how fast each library is, beside the limit of the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.analysis import LOADS, MAIN_METRICS, Results, Series, is_mapped
from benchmarks.loading_targets import PUBLISHED
from benchmarks.plan import COSTS_PER_ARRAY
from benchmarks.report import format_bytes
from benchmarks.systems import SYSTEMS
from benchmarks.targets import NATIVE, Standard

OURS, LIMIT, PEER = "#0b7a75", "#8d99a6", "#c9ced6"
LABELS = {
    "limit": "raw loops, no arrays",
    "waystation": "Waystation (JAX)",
    "waystation-torch": "Waystation (torch)",
    "waystation-safetensors-jax": "Waystation (JAX)",
    "waystation-safetensors-torch": "Waystation (torch)",
    "orbax": "Orbax, as it comes",
    "orbax-plain": "Orbax, no OCDBT, no zstd",
    "torch-dcp": "torch DCP",
    "safetensors-jax": "safetensors (flax)",
    "safetensors-torch": "safetensors (torch)",
    "fastsafetensors": "fastsafetensors",
    "runai": "Run:ai streamer",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One group of bars; `metric` is the one by which the systems are compared, if it is None."""

    state: str
    operation: str
    title: str
    metric: str | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """Several panels.

    Attributes:
        panels: In rows of three.
        kinds: What the states of the panels are, for the caption.
        standard: With what of Waystation others are compared.
        command: What measures it.
    """

    panels: tuple[Panel, ...]
    kinds: Mapping[str, str]
    standard: Standard
    command: str


CHECKPOINTS = Picture(
    (
        Panel("llama", "save", "Durable save"),
        Panel("llama", "load-cold", "Load, cold"),
        Panel("llama", "load-warm", "Load, warm"),
        Panel("small", "save", "Durable save, many small arrays"),
        Panel("small", "load-cold", "Load, cold, many small arrays"),
        Panel("small", "load-warm", "Load, warm, many small arrays"),
    ),
    {"llama": "model in bfloat16", "small": "small arrays"},
    NATIVE,
    "make bench",
)
LOADING = Picture(
    (
        Panel("llama", "load-cold", "Load, cold"),
        Panel("llama", "load-warm", "Load, warm"),
        Panel("llama-in-files", "stream-cold", "The first tensor of several files, cold", "first"),
        Panel("small", "load-cold", "Load, cold, many small tensors"),
        Panel("small", "load-warm", "Load, warm, many small tensors"),
        Panel("minilm", "load-warm", "Load, warm, all-MiniLM-L6-v2"),
    ),
    {
        "llama": "model in bfloat16",
        "llama-in-files": "the same in 5 files",
        "small": "small tensors",
        "minilm": "all-MiniLM-L6-v2",
    },
    PUBLISHED,
    "python -m benchmarks.loading",
)


def plotter() -> Any:
    """`matplotlib.pyplot`, set up to draw into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--chart needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "waystation"  # the same figures give the same file
    from matplotlib import pyplot

    return pyplot


def draw(document: dict[str, Any], path: Path, picture: Picture = CHECKPOINTS) -> None:
    """Draws what the document holds of the panels; the suffix of `path` decides the format."""
    pyplot = plotter()
    results = Results(document)
    panels = [panel for panel in picture.panels if _series(results, panel)]
    if not panels:
        raise SystemExit(f"there is nothing to draw: measure one of the states {', '.join(picture.kinds)}")
    rows, columns = -(-len(panels) // 3), min(3, len(panels))
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.3 * rows + 0.5), squeeze=False)
    cells = list(grid.flat)
    for axes, panel in zip(cells, panels, strict=False):
        _draw_panel(axes, results, panel, picture)
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    figure.text(0.01, 0.01, _caption(document, picture), fontsize=7.5, color="#555555")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _series(results: Results, panel: Panel) -> list[Series]:
    """The best manner of each system, fastest first: of loads, the best that reads and the best that maps."""
    found = []
    for name in LABELS:
        if panel.state in COSTS_PER_ARRAY and name == "limit":
            continue  # one file of raw bytes says nothing about the cost per array
        for ways in _kinds(name, panel.operation):
            series = results.best(panel.state, name, panel.operation, panel.metric, ways)
            found += [series] if series else []
    return sorted(found, key=lambda series: series.median)


def _kinds(name: str, operation: str) -> list[list[str] | None]:
    """The ways of a system that are one bar each."""
    system = SYSTEMS[name]
    if not operation.startswith(LOADS):
        return [None]
    ways = {*system.load_ways, *system.stream_ways}
    return [sorted(ways - system.mapped_ways), sorted(ways & system.mapped_ways)]


def _draw_panel(axes: Any, results: Results, panel: Panel, picture: Picture) -> None:
    rows = _series(results, panel)
    medians = [series.median for series in rows]
    colours = [_colour(series.system) for series in rows]
    axes.barh(range(len(rows)), medians, color=colours, height=0.72)
    axes.set_yticks(range(len(rows)), [_label(series) for series in rows], fontsize=8)
    axes.invert_yaxis()
    largest = max(medians)
    for position, series in enumerate(rows):
        label = _time(series.median) + _ratio(results, panel, series, picture.standard)
        axes.text(series.median + largest * 0.015, position, label, va="center", fontsize=7.5)
    axes.set_xlim(0, largest * 1.34)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _label(series: Series) -> str:
    return LABELS[series.system] + (", mapped" if is_mapped(series.system, series.way) else "")


def _ratio(results: Results, panel: Panel, series: Series, standard: Standard) -> str:
    """How many times faster Waystation is in the peer's framework."""
    if series.system.startswith("waystation") or series.system == "limit":
        return ""
    metric = panel.metric or MAIN_METRICS[panel.operation]
    ours = results.best_alike(panel.state, standard.opponent(series.system), panel.operation, series, metric)
    return f"  ({series.median / ours.median:.1f}x)" if ours else ""


def _colour(system: str) -> str:
    if system == "limit":
        return LIMIT
    return OURS if system.startswith("waystation") else PEER


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _caption(document: dict[str, Any], picture: Picture) -> str:
    """What was measured, on what, and how to do it again."""
    machine = document["machine"]
    states = []
    for state, kind in picture.kinds.items():
        runs = [run for run in document["runs"] if run["state"] == state and "arrays" in run]
        if runs:
            rounds = 1 + max(run["repetition"] for run in runs)
            size = f"{runs[0]['arrays']:,} arrays, {format_bytes(runs[0]['state_bytes'])}"
            states.append(f"{kind}: {size}, {rounds} runs")
    return (
        f"{'; '.join(states)}. Seconds, shorter is better; medians of interleaved runs, each in a fresh "
        f"process.\n{machine['cores']} cores of {machine['processor']}, {machine['file_system']}. "
        "In brackets: times Waystation's, in the same framework; mapped loads, with every page touched, "
        f"against mapped loads. Made by `{picture.command}`."
    )
