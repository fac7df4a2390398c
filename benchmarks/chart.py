"""The bar chart of the README: how fast each library saves and loads, beside the limit of the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.analysis import Results, Series, is_mapped
from benchmarks.report import format_bytes
from benchmarks.targets import JAX, ours_for

OURS, LIMIT, PEER = "#0b7a75", "#8d99a6", "#c9ced6"
LABELS = {
    "limit": "raw loops, no arrays",
    "waystation": "Waystation (JAX)",
    "waystation-torch": "Waystation (torch)",
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
    state: str
    operation: str
    title: str


PANELS = (
    Panel("llama", "save", "Durable save"),
    Panel("llama", "load-cold", "Load, cold"),
    Panel("llama", "load-warm", "Load, warm"),
    Panel("small", "save", "Durable save, many small arrays"),
    Panel("small", "load-cold", "Load, cold, many small arrays"),
    Panel("small", "load-warm", "Load, warm, many small arrays"),
)


def plotter() -> Any:
    """`matplotlib.pyplot`, set up to draw into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--chart needs matplotlib: pip install 'waystation[plot]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "waystation"  # the same figures give the same file
    from matplotlib import pyplot

    return pyplot


def draw(document: dict[str, Any], path: Path) -> None:
    """Draws what the document holds of the panels; the suffix of `path` decides the format."""
    pyplot = plotter()
    results = Results(document)
    panels = [panel for panel in PANELS if _series(results, panel)]
    if not panels:
        raise SystemExit("there is nothing to draw: measure the states llama or small")
    rows, columns = -(-len(panels) // 3), min(3, len(panels))
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.3 * rows + 0.5), squeeze=False)
    cells = list(grid.flat)
    for axes, panel in zip(cells, panels, strict=False):
        _draw_panel(axes, results, panel)
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    figure.text(0.01, 0.01, _caption(document), fontsize=7.5, color="#555555")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _series(results: Results, panel: Panel) -> list[Series]:
    """The best way of each system, fastest first; of Waystation's loads the default and the mapped one."""
    found = []
    for name in LABELS:
        kinds = [None] if panel.operation == "save" or not name.startswith(JAX) else [["read"], ["mmap"]]
        every = [results.best(panel.state, name, panel.operation, ways=ways) for ways in kinds]
        found += [series for series in every if series is not None]
    if panel.state == "small":  # one file of raw bytes says nothing about the cost per array
        found = [series for series in found if series.system != "limit"]
    return sorted(found, key=lambda series: series.median)


def _draw_panel(axes: Any, results: Results, panel: Panel) -> None:
    rows = _series(results, panel)
    medians = [series.median for series in rows]
    colours = [_colour(series.system) for series in rows]
    axes.barh(range(len(rows)), medians, color=colours, height=0.72)
    axes.set_yticks(range(len(rows)), [_label(series) for series in rows], fontsize=8)
    axes.invert_yaxis()
    largest = max(medians)
    for position, series in enumerate(rows):
        label = _time(series.median) + _ratio(results, panel, series)
        axes.text(series.median + largest * 0.015, position, label, va="center", fontsize=7.5)
    axes.set_xlim(0, largest * 1.34)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _label(series: Series) -> str:
    return LABELS[series.system] + (", mapped" if is_mapped(series.system, series.way) else "")


def _ratio(results: Results, panel: Panel, series: Series) -> str:
    """How many times faster Waystation is in the peer's framework."""
    if series.system.startswith("waystation") or series.system == "limit":
        return ""
    ours = results.best_alike(panel.state, ours_for(series.system), panel.operation, series)
    return f"  ({series.median / ours.median:.1f}x)" if ours else ""


def _colour(system: str) -> str:
    if system == "limit":
        return LIMIT
    return OURS if system.startswith("waystation") else PEER


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _caption(document: dict[str, Any]) -> str:
    """What was measured, on what, and how to do it again."""
    machine = document["machine"]
    states = []
    for state in dict.fromkeys(panel.state for panel in PANELS):
        runs = [run for run in document["runs"] if run["state"] == state and "arrays" in run]
        if runs:
            kind = {"llama": "model in bfloat16", "small": "small arrays"}[state]
            rounds = 1 + max(run["repetition"] for run in runs)
            size = f"{runs[0]['arrays']:,} arrays, {format_bytes(runs[0]['state_bytes'])}"
            states.append(f"{kind}: {size}, {rounds} runs")
    return (
        f"{'; '.join(states)}. Seconds, shorter is better; medians of interleaved runs, each in a fresh "
        f"process.\n{machine['cores']} cores of {machine['processor']}, {machine['file_system']}. "
        "In brackets: times Waystation's, in the same framework; mapped loads, with every page touched, "
        "against mapped loads. Made by `make bench`."
    )
