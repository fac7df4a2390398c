"""Draws the packages and crates, and what each imports, as docs/images/layers.svg.

    python tools/layers_diagram.py        # writes the picture
    python tools/layers_diagram.py --check  # fails if the picture is out of date

The edges are the imports that the sources contain and the path dependencies of the crates, without those that
follow from others. A package is drawn above everything that it imports.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python"
PICTURE = ROOT / "docs" / "images" / "layers.svg"

# The purpose of each box, as ARCHITECTURE.md has it in full.
PURPOSES = {
    "cli": "commands",
    "view": "the window, a web page",
    "waystation_demo": "programs that use the library",
    "waystation_launch": "processes of a program",
    "runtime": "one controller, many hosts",
    "memory": "checkpoints in host memory",
    "training": "sequences of checkpoints",
    "checkpoint": "save, load, verify",
    "integrations": "within other frameworks",
    "compat": "other libraries' functions",
    "safetensors": "published models",
    "transfers": "storage to leaves",
    "layouts": "bytes of a checkpoint",
    "frameworks": "JAX, torch, NumPy",
    "coordination": "rounds of processes",
    "tree": "containers, key paths",
    "grid": "boxes in arrays",
    "storage": "files of checkpoints",
    "_native": "the boundary",
    "agent": "the memory tier of a host",
    "store": "object stores",
    "io": "files, threads, devices",
    "transport": "blocks between hosts",
    "peers": "proved, signed links",
    "format": "headers, tables, slots",
}
CRATE_PREFIX = "waystation-"
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 178, 46, 22, 44, 16

Graph = dict[str, set[str]]


def imports() -> Graph:
    """Which boxes each box imports, by the sources of Python and the manifests of the crates."""
    graph: Graph = {name: set() for name in PURPOSES}
    for path in sorted(PYTHON.rglob("*.py")):
        root, *rest = path.relative_to(PYTHON).parts
        owner = rest[0].removesuffix(".py") if root == "waystation" else root
        if owner in graph:
            graph[owner] |= {name for name in imported_packages(path) if name in graph and name != owner}
    for manifest in sorted((ROOT / "crates").glob("*/Cargo.toml")):
        content = tomllib.loads(manifest.read_text())
        crate = content["package"]["name"].removeprefix(CRATE_PREFIX)
        owner = "_native" if crate == "python" else crate
        found = {name.removeprefix(CRATE_PREFIX) for name in content.get("dependencies", {})}
        graph[owner] |= found & graph.keys() - {owner}
    return graph


def imported_packages(path: Path) -> set[str]:
    """The packages of waystation, and those beside it, that a file imports by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            found.add(rest.split(".")[0] if root == "waystation" else root)
    return found


def without_implied(graph: Graph) -> Graph:
    """The edges that do not follow from others."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(graph[name])
        return found

    below = {name: reached(name) for name in graph}
    return {
        name: {
            target for target in targets if not any(target in below[other] for other in targets - {target})
        }
        for name, targets in graph.items()
    }


def rows_of(graph: Graph) -> list[list[str]]:
    """The boxes in rows, the highest first: each right below the lowest that imports it, if any does."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(target) for target in graph[name]), default=-1)
        return heights[name]

    for name in sorted(graph, key=height, reverse=True):
        importers = [heights[other] for other in graph if name in graph[other]]
        if importers:
            heights[name] = min(importers) - 1
    rows: list[list[str]] = [[] for _ in range(max(heights.values()) + 1)]
    for name in PURPOSES:
        rows[-1 - heights[name]].append(name)
    return rows


def draw(graph: Graph) -> str:
    """The picture, as SVG. Equal graphs give equal bytes."""
    rows = rows_of(graph)
    width = 2 * MARGIN + max(len(row) for row in rows) * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    places = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP_X) + GAP_X) // 2
        for index, name in enumerate(row):
            places[name] = (left + index * (BOX_WIDTH + GAP_X), MARGIN + number * (BOX_HEIGHT + GAP_Y))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name in PURPOSES:
        for target in sorted(graph[name]):
            (x1, y1), (x2, y2) = places[name], places[target]
            start, end = (x1 + BOX_WIDTH // 2, y1 + BOX_HEIGHT), (x2 + BOX_WIDTH // 2, y2)
            bend = (end[1] - start[1]) // 2
            lines.append(
                f'<path d="M{start[0]} {start[1]} C{start[0]} {start[1] + bend} {end[0]} {end[1] - bend} '
                f'{end[0]} {end[1]}" fill="none" stroke="#8895a7" stroke-width="1.2"/>'
            )
    for name, purpose in PURPOSES.items():
        x, y = places[name]
        is_crate = (ROOT / "crates" / f"{CRATE_PREFIX}{name}").exists() or name == "_native"
        title = f"{CRATE_PREFIX}{name}" if is_crate and name != "_native" else name
        fill = "#fbe9dc" if is_crate else "#e3edf8"
        centre = x + BOX_WIDTH // 2
        lines += [
            f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" '
            'stroke="#44546a"/>',
            label(centre, y + 20, 14, "#1b2733", title),
            label(centre, y + 37, 11, "#44546a", purpose),
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def label(x: int, y: int, size: int, color: str, text: str) -> str:
    """One centred line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="middle" fill="{color}">{text}</text>'


def main() -> None:
    """Writes the picture, or with `--check` compares it with the sources."""
    picture = draw(without_implied(imports()))
    if sys.argv[1:] == ["--check"]:
        if not PICTURE.exists() or PICTURE.read_text() != picture:
            sys.exit(f"{PICTURE.relative_to(ROOT)} is out of date; run `python tools/layers_diagram.py`")
    else:
        PICTURE.write_text(picture)


if __name__ == "__main__":
    main()
