"""The chart of `docs/scale.md`: merging, tables, and planning one load, by the number of processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chart import plotter

OURS, SECOND, THIRD, GUIDE = "#0b7a75", "#d08c2e", "#8d99a6", "#c9ced6"

Job = dict[str, Any]
Line = tuple[str, str, Callable[[Job], float]]


def draw(document: dict[str, Any], path: Path) -> None:
    """Draws the document; the suffix of `path` decides the format."""
    pyplot = plotter()
    figure, cells = pyplot.subplots(1, 4, figsize=(15, 3.9))
    for axes, (title, unit, lines) in zip(cells.flat, _panels(), strict=True):
        _draw_panel(axes, document["jobs"], title, unit, lines)
    machine = document["machine"]
    caption = (
        "1,000 arrays; every process holds 700 chunks of 256 KiB. Imagined jobs: the tables are real, the "
        "data and the network are not.\nMedians, each stage in a fresh process, on "
        f"{machine['cores']} cores of {machine['processor']}, {machine['file_system']}. Made by "
        "`python -m benchmarks.scale`."
    )
    figure.text(0.01, 0.01, caption, fontsize=7.5, color="#555555")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _panels() -> list[tuple[str, str, list[Line]]]:
    def stage(name: str, *steps: str) -> Callable[[Job], float]:
        return lambda job: statistics.median(
            sum(run["seconds"][step] for step in steps or run["seconds"]) for run in job[name]
        )

    def milliseconds(name: str) -> Callable[[Job], float]:
        return lambda job: 1e3 * stage(name)(job)

    def table(name: str) -> Callable[[Job], float]:
        return lambda job: float(job["merge"][0]["table_bytes"][name])

    def read(name: str) -> Callable[[Job], float]:
        return lambda job: max(run["table_bytes_read"] for run in job[name]) / 1e6

    return [
        (
            "Merging on the primary",
            "s",
            [
                ("read the parts", THIRD, stage("merge", "read")),
                ("decode and merge", OURS, stage("merge", "decode", "merge")),
                ("encode and write", SECOND, stage("merge", "encode", "write")),
            ],
        ),
        (
            "Size of the tables",
            "bytes",
            [
                ("checksums.bin", SECOND, table("checksums.bin")),
                ("chunks.bin", OURS, table("chunks.bin")),
                ("files.bin", THIRD, table("files.bin")),
            ],
        ),
        (
            "Planning one load",
            "ms",
            [
                ("half as many processes, cold", SECOND, milliseconds("plan-half-cold")),
                ("as many processes, cold", OURS, milliseconds("plan-cold")),
            ],
        ),
        (
            "Tables read for it",
            "MB",
            [
                ("half as many processes", SECOND, read("plan-half-cold")),
                ("as many processes", OURS, read("plan-cold")),
            ],
        ),
    ]


def _draw_panel(axes: Any, jobs: list[Job], title: str, unit: str, lines: list[Line]) -> None:
    counts = [job["processes"] for job in jobs]
    for label, colour, value in lines:
        axes.plot(counts, [value(job) for job in jobs], color=colour, label=label, marker="o", markersize=3)
    axes.set_xscale("log")
    if unit in ("s", "bytes"):  # what grows with the job
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.25 * max(value(job) for job in jobs for _, _, value in lines))
    axes.set_title(f"{title} ({unit})", fontsize=10, loc="left")
    axes.set_xlabel("processes", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(color=GUIDE, linewidth=0.5)
    axes.legend(fontsize=7.5, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
