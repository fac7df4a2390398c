"""Runs the cells of a page as a notebook would, with one library or another: one namespace for all cells, and
of each what it prints and the value at its end."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.programs import Place

FENCE = re.compile(r"^```(?:python (?P<name>\S+)|text)\n(?P<content>.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDE_DIRECTORY = "/tmp/maximizing_performance"
OUR_IMPORT = "import waystation as ocp"
LIBRARIES = {
    "native": OUR_IMPORT,
    "orbax layout": OUR_IMPORT,
    "orbax": "from orbax.checkpoint import v1 as ocp",
}


@dataclass(frozen=True)
class Cell:
    """A cell of a page.

    Attributes:
        name: Its name.
        code: The code.
        differs: What Waystation shows, where that is not what Orbax shows; else None.
    """

    name: str
    code: str
    differs: str | None = None


@dataclass(frozen=True)
class Shown:
    """What a cell shows.

    Attributes:
        value: Of the expression at its end; None if there is none.
        printed: What it printed.
    """

    value: str | None
    printed: str


class AskedForOrbax:
    """Waystation, in which every context asks for Orbax's layout from the start."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def Context(self, *arguments: Any) -> Any:  # noqa: N802 - the name in the library
        context = self._library.Context(*arguments)
        context.array.saving.use_ocdbt = True
        return context


def cells_of(page: Path) -> list[Cell]:
    """The cells of a page, in order."""
    cells: list[Cell] = []
    for found in FENCE.finditer(page.read_text()):
        if found["name"]:
            cells.append(Cell(found["name"], found["content"]))
        else:
            cells[-1] = Cell(cells[-1].name, cells[-1].code, found["content"].strip())
    return cells


def run_page(place: Place, page: Path, library: str, directory: Path) -> list[Shown]:
    """What the cells of a page show, run with a library in a directory."""
    namespace: dict[str, Any] = {}
    shown = []
    for cell in cells_of(page):
        code = cell.code.replace(GUIDE_DIRECTORY, str(directory)).replace(OUR_IMPORT, LIBRARIES[library])
        shown.append(_run(code, cell.name, namespace))
        if library == "orbax layout" and OUR_IMPORT in cell.code:
            namespace["ocp"] = AskedForOrbax(namespace["ocp"])
    return shown


def _run(code: str, name: str, namespace: dict[str, Any]) -> Shown:
    tree = ast.parse(code)
    ending = tree.body[-1]
    value: Any = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if isinstance(ending, ast.Expr):
            exec(compile(ast.Module(tree.body[:-1], []), name, "exec"), namespace)
            value = eval(compile(ast.Expression(ending.value), name, "eval"), namespace)
        else:
            exec(compile(tree, name, "exec"), namespace)
    return Shown(None if value is None else repr(value), printed.getvalue())
