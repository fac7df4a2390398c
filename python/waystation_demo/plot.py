"""The picture of the demo: the loss curves of all runs, and how far they are from the uninterrupted one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from waystation_demo.programs import TrainingRun
from waystation_demo.proof import LOSS_TOLERANCE, relative_differences

STYLES = ("-", "-", "--")  # of the killed run, the resumed one and the one resumed elsewhere


def available() -> bool:
    """Whether matplotlib, which is optional, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, reference: TrainingRun, killed: TrainingRun, resumed: list[TrainingRun]) -> None:
    """Writes the picture as a PNG."""
    # The object interface needs no display and leaves pyplot's global state alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    runs, killed_at = [killed, *resumed], max(killed.losses)
    _draw_curves(curves, reference, runs, killed_at)
    _draw_differences(differences, reference, runs, killed_at)
    figure.savefig(path, dpi=150)


def _draw_curves(axes: Any, reference: TrainingRun, runs: list[TrainingRun], killed_at: int) -> None:
    axes.plot(*_points(reference.losses), color="0.8", linewidth=7, label=_label(reference))
    for run, style in zip(runs, STYLES, strict=True):
        axes.plot(*_points(run.losses), style, linewidth=1.8, label=_label(run))
    axes.axvline(killed_at, color="crimson", linewidth=1)
    axes.annotate(" SIGKILL", (killed_at, axes.get_ylim()[1]), color="crimson", va="top")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("A language model in training: killed, resumed, and resumed on half the devices")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_differences(axes: Any, reference: TrainingRun, runs: list[TrainingRun], killed_at: int) -> None:
    for run, style in zip(runs, STYLES, strict=True):
        axes.plot(*_points(relative_differences(run, reference)), style, linewidth=1.8)
    axes.axhline(LOSS_TOLERANCE, color="0.5", linewidth=1)
    axes.text(
        0.01,
        1.4 * LOSS_TOLERANCE,
        "tolerance on another mesh",
        color="0.4",
        transform=axes.get_yaxis_transform(),
    )
    axes.axvline(killed_at, color="crimson", linewidth=1)
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_ylim(-1e-9, 10 * LOSS_TOLERANCE)
    axes.set_yticks([0, 1e-8, 1e-7, 1e-6, 1e-5], ["exactly 0", "1e-8", "1e-7", "1e-6", "1e-5"])
    axes.set_ylabel("relative difference")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(run: TrainingRun) -> str:
    return f"{run.name} (mesh {run.mesh})"


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]
