"""Processes that save one checkpoint again and again, for readers beside them.

Every element of what a process saves is a number of its own, so a mixture of two versions shows.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.programs import Place, Programs, running

import waystation
from waystation import Context

WRITERS = 2


def state_of(number: int) -> dict[str, Any]:
    """A state all of whose elements are a number, in several files of every layout."""
    return {
        "number": np.array(number),
        "large": np.full(200_000, number),
        "small": [np.full(1000, number) for _ in range(50)],
    }


def context_of(layout: str) -> Context:
    """The options of saves in a layout: `native`, `ocdbt` or `zarr`."""
    context = Context()
    if layout != "native":
        context.array.saving.use_ocdbt = layout == "ocdbt"
    return context


def _save(path: Path, state: dict[str, Any], *, deletes: bool) -> None:
    if deletes:
        with contextlib.suppress(FileNotFoundError):
            waystation.delete(path)
    try:
        waystation.save(path, state, overwrite=not deletes)
    except FileExistsError:
        assert deletes, "an overwrite replaces what is there"


def writing(path: Path, way: str, layout: str, saves: int | None = None) -> AbstractContextManager[Programs]:
    """Processes that save so often, or as often as each is sent True before it is sent False."""
    return running(_write, path, way, layout, saves, count=WRITERS, framework="torch", directory=path.parent)


def _write(place: Place, path: Path, way: str, layout: str, saves: int | None) -> None:
    if way == "in place":
        from tests.support import plain_renames

        plain_renames.allow_only_plain_renames()
    left = saves
    with context_of(layout):
        while place.receive() if left is None else left:
            _save(path, state_of(place.index + 1), deletes=way == "delete")
            left = None if left is None else left - 1
