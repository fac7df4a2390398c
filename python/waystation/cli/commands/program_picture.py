"""The picture of a program: its graph, from top to bottom, with a color for each slice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from waystation.runtime.ir import Arg, Compute, HostCall, Program, Reshard, Result, Value

_COLORS = ("#8dd3c7", "#fdb462", "#80b1d3", "#fb8072", "#b3de69", "#bebada", "#fccde5", "#ffffb3")
_BOX = {"boxstyle": "round,pad=0.35", "edgecolor": "0.3", "linewidth": 0.8}


def available() -> bool:
    """Whether matplotlib, which is optional, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, program: Program) -> None:
    """Writes the picture as a PNG; frees are left out."""
    # The object interface needs no display and leaves pyplot's global state alone.
    from matplotlib.figure import Figure

    places = layout(program)
    width = 1 + max(column for column, _ in places.values())
    depth = 1 + max(row for _, row in places.values())
    figure = Figure(figsize=(max(4.0, 2.6 * width), max(3.0, 0.9 * depth)), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_ylim(depth - 0.4, -0.6)
    axes.set_title(f"program '{program.name}'")
    makers = {value.number: at for at, node in enumerate(program.nodes) for value in node.results}
    for at in places:
        for number in dict.fromkeys(program.nodes[at].operands):
            _draw_edge(axes, places[makers[number]], places[at])
    for at, place in places.items():
        text, color = _label(program, at)
        axes.text(*place, text, ha="center", va="center", fontsize=8, bbox={**_BOX, "facecolor": color})
    for part in program.slices:
        shape = " x ".join(map(str, part.shape))
        axes.scatter([], [], color=_color(part.number), label=f"slice @{part.number}: {shape} devices")
    if program.slices:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)


def layout(program: Program) -> dict[int, tuple[int, int]]:
    """Column and row of each node that is drawn: a row below all that it uses, beside those of that row."""
    rows: dict[int, int] = {}  # of values
    taken: dict[int, int] = {}
    places: dict[int, tuple[int, int]] = {}
    for at, node in enumerate(program.nodes):
        if not isinstance(node, Arg | Compute | HostCall | Reshard | Result):
            continue
        row = 1 + max((rows[number] for number in node.operands), default=-1)
        if isinstance(node, Result):
            row = 1 + max(taken, default=-1)
        column = taken.get(row, 0)
        taken[row] = column + 1
        places[at] = column, row
        rows.update((value.number, row) for value in node.results)
    return places


def _draw_edge(axes: Any, begin: tuple[int, int], end: tuple[int, int]) -> None:
    axes.annotate(
        "", end, begin, arrowprops={"arrowstyle": "-|>", "color": "0.5", "shrinkA": 10, "shrinkB": 12}
    )


def _label(program: Program, at: int) -> tuple[str, str]:
    node = program.nodes[at]
    name = getattr(node, "label", node.kind)
    kind = "" if name == node.kind or isinstance(node, Compute) else f"{node.kind} "
    lines = [f"{kind}{name}", *dict.fromkeys(map(_value, node.results))]
    slices = [value.slice for value in node.results] or [getattr(node, "slice", -1)]
    return "\n".join(lines), _color(slices[0])


def _value(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _color(slice_number: int) -> str:
    return "white" if slice_number < 0 else _COLORS[slice_number % len(_COLORS)]
