"""The picture of a timeline: devices as rows, clients as colors, with the share of each."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from waystation._errors import Unsupported

if TYPE_CHECKING:
    from waystation.runtime.timeline.timeline import Timeline

_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
_IDLE = "0.93"


def available() -> bool:
    """Whether matplotlib, which is optional, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, timeline: Timeline, title: str = "") -> None:
    """Writes the picture as a PNG.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    if not available():
        raise Unsupported(
            "pictures of timelines need matplotlib, which is not installed: pip install matplotlib"
        )
    # The object interface needs no display and leaves pyplot's global state alone.
    from matplotlib.figure import Figure

    rows = {device: place for place, device in enumerate(timeline.devices)}
    times = [time for each in timeline.computations for time in (each.begin_ns, each.end_ns)]
    begin_ns, end_ns = min(times, default=0), max(times, default=1)
    spans: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for each in timeline.computations:
        span = ((each.begin_ns - begin_ns) / 1e6, (each.end_ns - each.begin_ns) / 1e6)
        spans[each.client][rows[each.host, each.device]].append(span)

    figure = Figure(figsize=(10, max(2.2, 1.4 + 0.28 * len(rows))), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(_IDLE)
    shares = timeline.shares()
    for place, client in enumerate(timeline.clients):
        color = _COLORS[place % len(_COLORS)]
        for row, bars in spans[client].items():
            axes.broken_barh(bars, (row - 0.45, 0.9), facecolors=color, linewidth=0)
        label = f"{client or '(unknown)'}: {shares.get(client, 0):.1%} of device time"
        axes.barh(0, 0, color=color, label=label)
    axes.barh(0, 0, color=_IDLE, label="idle")
    axes.set_yticks(range(len(rows)), [f"{host} device {device}" for host, device in rows], fontsize=8)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_xlim(0, (end_ns - begin_ns) / 1e6)
    axes.set_xlabel("milliseconds")
    if title:
        axes.set_title(title)
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
