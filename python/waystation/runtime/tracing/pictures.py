"""Pictures of shardings: which devices of a slice hold which part of an array.

Arrays that are divided along one or two axes are drawn as a grid of their parts, each with the places of its
devices in the slice; replicas share a part.
"""

from __future__ import annotations

import html
from collections import defaultdict

from waystation.grid import Shape
from waystation.runtime.ir import Sharding

_MOST_PARTS = 256
_COLORS = ("#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")


def picture(shape: Shape, sharding: Sharding) -> str:
    """The picture as text."""
    rows = _parts(shape, sharding)
    if rows is None:
        return _words(shape, sharding)
    width = max(len(cell) for row in rows for cell in row) + 2

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for _ in rows[0]) + right

    lines = [line("┌", "┬", "┐")]
    for place, row in enumerate(rows):
        lines += [line("├", "┼", "┤")] * bool(place)
        lines.append(f"│{'│'.join(cell.center(width) for cell in row)}│")
    return "\n".join([*lines, line("└", "┴", "┘")])


def picture_html(heading: str, shape: Shape, sharding: Sharding) -> str:
    """The picture for notebooks, below a line of text."""
    rows = _parts(shape, sharding)
    title = f"<div>{html.escape(heading)}</div>"
    if rows is None:
        return f"{title}<div>{html.escape(_words(shape, sharding))}</div>"
    colors: dict[str, str] = {}
    for row in rows:
        for cell in row:
            colors.setdefault(cell, _COLORS[len(colors) % len(_COLORS)])
    style = "border:1px solid #666;padding:0.6em 1em;text-align:center;color:#000;background:"
    cells = [[f'<td style="{style}{colors[cell]}">{cell}</td>' for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'{title}<table style="border-collapse:collapse">{body}</table>'


def _parts(shape: Shape, sharding: Sharding) -> list[list[str]] | None:
    """The devices of each part, in rows; None where that cannot be drawn."""
    divisions = sharding.divisions(len(shape))
    divided = [axis for axis, parts in enumerate(divisions) if parts > 1]
    if len(divided) > 2 or 0 in shape:
        return None
    drawn = sorted((divided + [axis for axis in range(len(shape)) if axis not in divided])[:2])
    # A vector is a row, a scalar one cell.
    places = [None] * (2 - len(drawn)) + drawn
    counts = [1 if axis is None else divisions[axis] for axis in places]
    if counts[0] * counts[1] > _MOST_PARTS:
        return None
    devices: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    extents = sharding.shard_shape(shape)
    for place in range(sharding.device_count):
        offset, _ = sharding.box(place, extents)
        at = tuple(0 if axis is None else offset[axis] // extents[axis] for axis in places)
        devices[at].append(str(place))
    return [[",".join(devices[row, column]) for column in range(counts[1])] for row in range(counts[0])]


def _words(shape: Shape, sharding: Sharding) -> str:
    parts = " x ".join(map(str, sharding.divisions(len(shape)))) or "1"
    return f"{parts} parts over {sharding.device_count} devices"
