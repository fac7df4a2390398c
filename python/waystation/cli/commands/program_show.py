"""`waystation program show`: a program as text and as a picture."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waystation._errors import from_os_error
from waystation.cli.output import Output
from waystation.errors import Corrupt, InvalidInput, NotFound, Unavailable, Unsupported, WaystationError
from waystation.runtime.ir import (
    Arg,
    Compute,
    HostCall,
    Program,
    Reshard,
    Result,
    Value,
    decode,
    fingerprint,
    parse,
    show,
)
from waystation.runtime.needs import advice


def run(output: Output, source: str, picture: Path | None) -> None:
    """Shows it."""
    programs = find(source)
    if picture is not None:
        if not matplotlib_available():
            raise Unavailable("a picture needs matplotlib; install it, or leave --picture out")
        draw(picture, programs[-1])
    if output.as_json:
        output.document({"programs": [_document(each) for each in programs]})
        return
    for each in programs:
        kinds: dict[str, int] = {}
        for node in each.nodes:
            kinds[node.kind] = kinds.get(node.kind, 0) + 1
        for line in show(each).splitlines():
            output.line(line)
        output.line(", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    if picture is not None:
        output.line(f"drawn to {picture}")


def find(source: str) -> tuple[Program, ...]:
    """The programs that a source names: one, or all that a function was traced to.

    Raises:
        NotFound: There is no such file, module or name.
        InvalidInput: What is there is no program.
    """
    path = Path(source)
    if path.is_file():
        return (_read(path),)
    module, colon, name = source.partition(":")
    if not colon:
        raise NotFound(f"there is no file '{source}'; name a file, or a program of a module: module:name")
    sys.path.insert(0, "")  # as for python -m: modules of the directory that the command runs in
    try:
        found: Any = importlib.import_module(module)
    except WaystationError:
        raise
    except ModuleNotFoundError as error:
        raise NotFound(f"module '{module}' cannot be imported: {error}{_remedy(error)}") from error
    except Exception as error:  # the module's own code runs, and may raise anything
        raise InvalidInput(f"module '{module}' cannot be imported: {_told(error)}") from error
    finally:
        sys.path.remove("")
    for part in name.split("."):
        if not hasattr(found, part):
            raise NotFound(f"module '{module}' has no '{name}'")
        found = getattr(found, part)
    return _programs(found, source)


def _programs(found: Any, source: str) -> tuple[Program, ...]:
    if callable(found) and not hasattr(found, "programs"):
        found = _called(found, source)
    if isinstance(found, Program):
        return (found,)
    traced = getattr(found, "programs", None)
    if isinstance(traced, tuple) and traced and all(isinstance(each, Program) for each in traced):
        return traced
    raise InvalidInput(
        f"'{source}' is no program that was traced; call it in its module, or name a function that "
        "returns function.trace(…)"
    )


def _called(function: Callable[..., Any], source: str) -> Any:
    """What a function without arguments returns; it is somebody else's, so its errors are not ours."""
    needed = _needed_arguments(function)
    if needed:
        raise InvalidInput(
            f"'{source}' wants arguments ({', '.join(needed)}); name a program that was traced, or a "
            "function without arguments that returns one"
        )
    try:
        return function()
    except WaystationError:
        raise
    except Exception as error:
        raise InvalidInput(f"'{source}' was called and raised {_told(error)}{_remedy(error)}") from error


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins do not tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in optional]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _remedy(error: Exception) -> str:
    """What to install, where a module of the runtime's extra is missing."""
    command = advice(error) if isinstance(error, ImportError) else None
    return f"; {command}" if command else ""


def _read(path: Path) -> Program:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise from_os_error(error, "read", str(path)) from error
    if data.startswith(b"program "):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"'{path}' is no text of a program: {error}") from error
        return parse(text)
    try:
        found = decode(data)
    except Corrupt as error:
        raise InvalidInput(
            f"'{path}' holds no program of the runtime: {error.message}; give a file with the text that "
            "'waystation program show' prints, or with the bytes that waystation.runtime.ir.encode returns"
        ) from error
    if not isinstance(found, Program):
        raise Unsupported(f"'{path}' holds a {type(found).__name__}, which is not a program in the high form")
    return found


def _document(program: Program) -> dict[str, Any]:
    return {
        "name": program.name,
        "fingerprint": fingerprint(program),
        "slices": [list(part.shape) for part in program.slices],
        "nodes": [node.kind for node in program.nodes],
        "text": show(program),
    }


# ---- the picture -------------------------------------------------------------------------------
# The picture of a program: its graph, from top to bottom, with a color for each slice.


_COLORS = ("#8dd3c7", "#fdb462", "#80b1d3", "#fb8072", "#b3de69", "#bebada", "#fccde5", "#ffffb3")
_BOX = {"boxstyle": "round,pad=0.35", "edgecolor": "0.3", "linewidth": 0.8}


def matplotlib_available() -> bool:
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
