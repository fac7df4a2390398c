"""Decisions about thousands of arrays that are of few kinds, each taken once.

A published model has many tensors and few shapes, dtypes and places, and its stored arrays are the same
objects where they are equal. So what is decided about one holds for all of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from waystation._errors import WaystationError
from waystation.frameworks.base import StoredArray, Target


def targets_by_kind(
    choose: Callable[[StoredArray, str, Any, int], Target],
    stored: Sequence[StoredArray],
    dtypes: Sequence[str],
    places: Sequence[Any],
) -> list[Target]:
    """Targets, of which those with the same description, dtype and place are one object.

    Args:
        choose: Makes that of an array, from these and its index.
        stored: The arrays; equal ones may be one object.
        dtypes: Of each, logical.
        places: Of each.

    Raises:
        WaystationError: What `choose` has raised about the first array of its kind, with its `index`.
    """
    known: dict[tuple[int, str, int], Target] = {}
    found: list[Target] = []
    for index, (array, dtype, place) in enumerate(zip(stored, dtypes, places, strict=True)):
        kind = id(array), dtype, id(place)
        target = known.get(kind)
        if target is None:
            try:
                target = known[kind] = choose(array, dtype, place, index)
            except WaystationError as error:
                raise error.where(index=index)
        found.append(target)
    return found
