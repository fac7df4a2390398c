"""Distinct numbers, and distinct objects.

`numpy.unique` asks whether its array is masked, and for that imports `numpy.ma` when it is first called: a
good part of the time in which a process loads its first model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from waystation import _native

T = TypeVar("T")


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """The distinct numbers of a one-dimensional array, ascending."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


class Shared(Sequence[T]):
    """Objects many of which are the same: the distinct ones, and of each place which of them is there.

    What is known of thousands of arrays is a few objects, which they share: so it is looked at once for each.
    """

    __slots__ = ("_distinct", "_which")

    def __init__(self, objects: Sequence[T]) -> None:
        self._distinct, self._which = distinct_objects(objects)

    def __len__(self) -> int:
        return len(self._which)

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> list[T]: ...

    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self._distinct[which] for which in self._which[place].tolist()]
        return self._distinct[int(self._which[place])]

    def __iter__(self) -> Iterator[T]:
        return map(self._distinct.__getitem__, self._which.tolist())

    def parts(self) -> tuple[list[T], NDArray[np.int64]]:
        """The distinct objects, and the numbers."""
        return self._distinct, self._which


def distinct_objects(objects: Sequence[T]) -> tuple[list[T], NDArray[np.int64]]:
    """The distinct objects, by identity and in order, and for each object its place among them."""
    if isinstance(objects, Shared):
        return objects.parts()
    distinct, which = _native.distinct_objects(objects if type(objects) is list else list(objects))
    return distinct, np.frombuffer(which, np.int64)
