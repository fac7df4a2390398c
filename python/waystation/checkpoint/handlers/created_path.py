"""The directory that a handler is given to save to.

A save makes the directories of all handlers before it calls any, once for all processes. So nobody waits.
Invariant: only that directory is made; what a handler wants below it, it makes itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class CreatedPath:
    """A `PathAwaitingCreation` of a directory that is there already, or of a path below one."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __truediv__(self, other: str | os.PathLike[str]) -> CreatedPath:
        return CreatedPath(self._path / other)

    @property
    def path(self) -> Any:
        """The path: `pathlib.Path`, or what the option `file.path_class` makes of it."""
        return self._path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self._path).name

    async def await_creation(self) -> Any:
        """The path."""
        return self._path

    def __repr__(self) -> str:
        return f"CreatedPath({str(self._path)!r})"
