"""What is in the golden checkpoints."""

from __future__ import annotations

import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import waystation
from waystation import handlers


class Moments(NamedTuple):
    """A node that is registered when the golden state is read."""

    first: Any
    second: Any


waystation.register_node(Moments)


def state() -> dict[str, Any]:
    """The state in the golden checkpoint, without frameworks: NumPy and plain values only."""
    counting = np.arange(24)
    return {
        "every dtype": {
            name: counting.astype(np.dtype(getattr(ml_dtypes, name, None) or name)).reshape(2, 3, 4)
            for name in (
                *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
                *("float16", "float32", "float64", "complex64", "complex128"),
                *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "uint4"),
            )
        },
        "numpy": [np.array(["a", "äöü"]), np.array(["2026-11-21"], "M8[D]"), np.arange(3, dtype=">i4")],
        "shapes": (np.zeros((0, 3), np.float32), np.array(7.5), np.float32(3)),
        "aligned": np.arange(70_000, dtype=np.uint8).reshape(7, 10_000),
        "node": Moments(np.ones(3), (None, {}, [], ())),
        "a.b": np.zeros(2),
        "a": {"b": np.ones(2)},
        3: {"\0": 1, b"bytes": 2, (1, "x"): 3, "\ud800": 4, None: 5, 1.5: 6, True: 7},
        "scalars": [True, -1, 1 << 100, 0.1, -math.inf, 1 + 2j, "text\0", b"\x00\xff"],
        "long": "ü" * 40_000,
    }


CUSTOM_METADATA = {"made": "by hand", "nested": [1, None, {"x": 1.5}]}


class Notes:
    """What a handler of the program's own saves."""

    def __init__(self, text: str) -> None:
        self.text = text


class NotesHandler:
    """Puts every line into a file of its own, below directories, and an empty file beside them."""

    async def save(self, directory: Any, notes: Notes) -> Awaitable[None]:
        """Writes them."""

        async def write() -> None:
            path = await directory.await_creation()
            for number, line in enumerate(notes.text.splitlines()):
                below = path / "lines" / str(number % 2)
                below.mkdir(parents=True, exist_ok=True)
                (below / f"ü {number}.txt").write_text(line, encoding="utf-8")
            (path / "empty").touch()

        return write()

    async def load(self, directory: Path, abstract: object = None) -> Awaitable[Notes]:
        """Reads them."""

        async def read() -> Notes:
            files = sorted((directory / "lines").rglob("*.txt"), key=lambda file: file.name)
            return Notes("\n".join(file.read_text(encoding="utf-8") for file in files))

        return read()

    async def metadata(self, directory: Path) -> None:
        """Nothing."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is notes."""
        return isinstance(checkpointable, Notes)

    def is_abstract_handleable(self, abstract: Any) -> None:
        """Left to who saved."""


def with_handlers() -> waystation.Context:
    """A context in which handlers save, and load, what is in files."""
    context = waystation.Context()
    registry = handlers.local_registry().add(NotesHandler)
    context.checkpointables.registry = registry.add(handlers.JsonHandler, checkpointable_name="config")
    return context


def checkpointables() -> dict[str, Any]:
    """Two checkpointables in files of handlers, beside a state."""
    return {
        "config": {"name": "gölden", "sizes": [1, 2.5, None, True]},
        "notes": Notes("one\nzwölf\nthree"),
        "state": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "step": 3},
    }
