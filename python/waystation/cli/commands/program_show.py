"""`waystation program show`: a program as text and as a picture."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waystation.cli.commands import program_picture
from waystation.cli.output import Output
from waystation.errors import InvalidInput, NotFound, Unavailable, Unsupported, WaystationError
from waystation.runtime.ir import Program, decode, fingerprint, parse, show
from waystation.runtime.needs import advice


def run(output: Output, source: str, picture: Path | None) -> None:
    """Shows it."""
    programs = find(source)
    if picture is not None:
        if not program_picture.available():
            raise Unavailable("a picture needs matplotlib; install it, or leave --picture out")
        program_picture.draw(picture, programs[-1])
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
    data = path.read_bytes()
    if data.startswith(b"program "):
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"'{path}' is no text of a program: {error}") from error
        return parse(text)
    found = decode(data)
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
