"""A program that saves one checkpoint again and again, for readers beside it.

Run as `python -m tests.support.overwriting PATH NUMBER WAY LAYOUT [SAVES]`. It saves SAVES times, or once for
each line of its input. Every element of what it saves is NUMBER, so a mixture of two versions shows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import waystation
from waystation import Context


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


def main() -> None:
    """Saves as the arguments say."""
    path, number, way, layout, *count = sys.argv[1:]
    if way == "in place":
        from tests.support import plain_renames

        plain_renames.allow_only_plain_renames()
    rounds: Iterable[Any] = range(int(count[0])) if count else sys.stdin
    with context_of(layout):
        for _ in rounds:
            _save(Path(path), state_of(int(number)), deletes=way == "delete")


if __name__ == "__main__":
    main()
