"""JSON as Orbax writes it: read without trust, written as Python's `json` does by default.

Invariant: whatever a file holds, reading it gives a value of the promised shape or raises Corrupt.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from waystation._errors import Corrupt, WaystationError
from waystation.tree import parse_json

EXTENT_LIMIT = 1 << 62
_DIMENSION_LIMIT = 64

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)


def dump(value: Any) -> bytes:
    """The bytes of a file."""
    return json.dumps(value).encode()


def parse_object(data: bytes | str, path: str) -> dict[str, Any]:
    """The object that the file `path` holds.

    Raises:
        Corrupt: It holds no such thing.
    """
    value = parse_json(data, path, allow_nan=True)
    if not isinstance(value, dict):
        raise Corrupt(f"'{path}' does not hold a JSON object", path=path)
    return value


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Within it, what looking into a malformed value raises becomes Corrupt."""
    try:
        yield
    except WaystationError:
        raise
    except _MALFORMED as error:
        problem = "values nest too deeply" if isinstance(error, RecursionError) else error
        raise Corrupt(f"'{path}' is malformed: {problem}", path=path) from error


def require(condition: bool, problem: str) -> None:
    """Raises what `reading` makes Corrupt."""
    if not condition:
        raise ValueError(problem)


def text(value: Any) -> str:
    """A string."""
    require(isinstance(value, str), "something is no text that should be")
    return str(value)


def shape(value: Any) -> tuple[int, ...]:
    """A shape."""
    require(isinstance(value, list) and len(value) <= _DIMENSION_LIMIT, "a shape is no list of extents")
    for extent in value:
        require(type(extent) is int and 0 <= extent < EXTENT_LIMIT, "a shape holds what is no extent")
    return tuple(value)
