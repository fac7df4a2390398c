"""Decisions about thousands of arrays that are of few kinds, each taken once.

A published model has many tensors and few shapes, dtypes and places, and its stored arrays are the same
objects where they are equal. So what is decided about one holds for all of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from waystation import _native
from waystation._errors import WaystationError
from waystation.frameworks.base import ArraySource, Contiguous, StoredArray, Target


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


def contiguous_by_kind(
    describe: Callable[[int], ArraySource], arrays: Sequence[Any], alike: Sequence[object], *, hold: bool
) -> Contiguous:
    """What `Codec.contiguous` says of leaves whose memory the buffer protocol gives.

    Args:
        describe: Describes a leaf, given by its place, without blocks. Refusals are left to `Codec.sources`.
        arrays: Of each leaf what has the buffer.
        alike: Of each an object that leaves have in common of which the same is said, if their shapes agree;
            None leaves it to `Codec.sources`.
        hold: Whether views keep the memory. Else the arrays do.
    """
    found, starts, views = _native.view_arrays(list(arrays), list(alike), hold=hold)
    which = np.frombuffer(found, np.int64).copy()
    kinds: list[ArraySource | None] = []
    is_new = np.diff(np.maximum.accumulate(which), prepend=-1) > 0
    for first in np.flatnonzero(is_new).tolist():
        try:
            kinds.append(describe(first))
        except WaystationError:
            which[which == len(kinds)] = -1
            kinds.append(None)
    owners = arrays if views is None else [views] * len(arrays)
    return Contiguous(kinds, which, np.frombuffer(starts, np.int64), owners)
