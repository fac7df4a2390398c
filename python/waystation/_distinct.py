"""Distinct numbers, and distinct objects.

`numpy.unique` asks whether its array is masked, and for that imports `numpy.ma` when it is first called: a
good part of the time in which a process loads its first model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct numbers of a one-dimensional array, ascending."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def distinct_objects(objects: Sequence[T]) -> tuple[list[T], NDArray[np.int64]]:
    """The distinct objects, by identity and in order, and for each object its place among them.

    What is known of thousands of arrays is a few objects, which they share: so it is looked at once for each.
    """
    identities = list(map(id, objects))
    known = dict(zip(identities, objects, strict=True))
    places = dict(zip(known, range(len(known)), strict=True))
    which = np.fromiter(map(places.__getitem__, identities), np.int64, len(identities))
    return list(known.values()), which
