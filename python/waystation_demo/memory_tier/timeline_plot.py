"""The picture of the demo: both recoveries from the loss of the host on, and what agents did meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from waystation_demo.memory_tier.timeline import MEANINGS, SHARED_PHASES, Timeline

COLORS = {
    "detect": "0.55",
    "process start": "0.85",
    "decide": "tab:purple",
    "transfer": "tab:orange",
    "restore": "tab:green",
    "first step": "tab:blue",
    "train again": "crimson",
}


def draw(path: Path, timelines: dict[str, Timeline], lost_host: int) -> None:
    """Writes the picture as a PNG."""
    # The object interface needs no display and leaves pyplot's global state alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    whole, parts = figure.subplots(2, 1, height_ratios=[1.5, 1])
    _draw_whole(whole, timelines, lost_host)
    _draw_parts(parts, timelines)
    figure.savefig(path, dpi=150)


def _draw_whole(axes: Any, timelines: dict[str, Timeline], lost_host: int) -> None:
    rows = [f"back from {name}" for name in timelines]
    for row, timeline in enumerate(timelines.values()):
        for phase in timeline.phases:
            axes.barh(row, phase.took_s, left=phase.begin_s, color=COLORS[phase.name], height=0.6)
    agents = [agent for timeline in timelines.values() for agent in timeline.agents]
    for host in sorted({agent.host for agent in agents}):
        row = len(rows)
        rows.append(f"agent of host-{host}" + (" (new)" if host == lost_host else ""))
        for agent in (agent for agent in agents if agent.host == host):
            decided_s = agent.begin_s + agent.decide_s
            axes.barh(row, agent.decide_s, left=agent.begin_s, color=COLORS["decide"], height=0.3)
            axes.barh(row, agent.transfer_s, left=decided_s, color=COLORS["transfer"], height=0.3)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds after the loss of the host")
    axes.set_title("A host is lost with its memory: from there until training is where it had been")
    handles = [axes.barh(0, 0, color=color, label=name) for name, color in COLORS.items()]
    axes.legend(handles=handles, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_parts(axes: Any, timelines: dict[str, Timeline]) -> None:
    names = [name for name in MEANINGS if name not in SHARED_PHASES]
    height = 0.8 / len(timelines)
    for place, (source, timeline) in enumerate(timelines.items()):
        for row, name in enumerate(names):
            took_s = timeline.took_s(name)
            if took_s <= 0:
                continue
            at = row + (place - (len(timelines) - 1) / 2) * height
            axes.barh(at, took_s, color=COLORS[name], alpha=1 - 0.5 * place, height=0.9 * height)
            axes.text(took_s, at, f" {source} {took_s:.3f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("seconds of each phase, without those of which nothing depends on where the state is")
    axes.spines[["top", "right"]].set_visible(False)
