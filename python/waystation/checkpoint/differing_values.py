"""In what the values of two arrays differ, counted up piece by piece.

Bits are compared first, since most values of most checkpoints are equal; only elements whose bits differ
are looked at as numbers, a block at a time, so that the wider types needed for that stay small. Integers
are subtracted exactly. Elements that are no numbers (keys, strings, packed bytes) are equal or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from waystation.grid import Box

Values = np.ndarray[Any, Any]

_BLOCK_ITEMS = 1 << 18
_BIT_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """By how much numbers may differ; without any, not in a single bit."""

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether nothing is tolerated."""
        return self.absolute == 0 and self.relative == 0


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the values of a leaf differ.

    Attributes:
        elements: Elements of the array.
        differing: Those that differ by more than is tolerated.
        max_absolute: The largest difference; None if the elements are no numbers or only NaNs differ.
        max_relative: The largest difference as a part of the larger magnitude.
        unequal_nans: Elements that are NaN in one checkpoint only.
        first_index: Index of the first element that differs.
        first_values: Its text in both checkpoints.
        norm: The Euclidean norm of the differences: the root of the sum of their squares, of elements that
            differ by more than is tolerated and are NaN in neither checkpoint. None where `max_absolute` is.
    """

    elements: int
    differing: int
    max_absolute: float | None
    max_relative: float | None
    unequal_nans: int
    first_index: tuple[int, ...]
    first_values: tuple[str, str]
    norm: float | None = None


class Tally:
    """Counts the differences of one array as its pieces come, in C order.

    Args:
        shape: Of the array.
        tolerance: What is not counted.
        numeric: Whether the elements are numbers.
    """

    def __init__(self, shape: tuple[int, ...], tolerance: Tolerance, *, numeric: bool) -> None:
        self._shape = shape
        self._tolerance = tolerance
        self._numeric = numeric
        self._differing = 0
        self._unequal_nans = 0
        self._max_absolute: float | None = None
        self._max_relative: float | None = None
        self._squares = np.longdouble(0)
        self._first: tuple[tuple[int, ...], tuple[str, str]] | None = None

    def add(self, box: Box, one: Values, two: Values) -> None:
        """Counts a piece: the values of the same box, contiguous, of both arrays."""
        items = math.prod(box[1])
        flat = [values.reshape(items, *values.shape[len(box[1]) :]) for values in (one, two)]
        start = int(np.ravel_multi_index(box[0], self._shape)) if self._shape else 0
        for begin in range(0, items, _BLOCK_ITEMS):
            end = min(items, begin + _BLOCK_ITEMS)
            self._add_block(start + begin, flat[0][begin:end], flat[1][begin:end])

    def difference(self) -> ValueDifference | None:
        """What was counted; None if nothing differs."""
        if self._first is None:
            return None
        return ValueDifference(
            math.prod(self._shape),
            self._differing,
            self._max_absolute,
            self._max_relative,
            self._unequal_nans,
            *self._first,
            None if self._max_absolute is None else float(np.sqrt(self._squares)),
        )

    def _add_block(self, start: int, one: Values, two: Values) -> None:
        if one.dtype == two.dtype:
            unequal = _unequal_bits(one, two)
            if not unequal.any():
                return
        else:
            unequal = np.ones(len(one), bool)
        places = np.flatnonzero(unequal)
        if self._numeric:
            places = places[self._count_numbers(one[places], two[places], same_dtype=one.dtype == two.dtype)]
        if not len(places):
            return
        self._differing += len(places)
        if self._first is None:
            place = int(places[0])
            index = (
                tuple(int(at) for at in np.unravel_index(start + place, self._shape)) if self._shape else ()
            )
            self._first = index, (_text(one[place]), _text(two[place]))

    def _count_numbers(self, one: Values, two: Values, *, same_dtype: bool) -> Values:
        """Which of these elements count as differing; takes note of by how much."""
        with np.errstate(all="ignore"):
            wide_one, wide_two = _widened(one, two)
            nans = np.isnan(wide_one), np.isnan(wide_two)
            gap = _gap(wide_one, wide_two)
            size = np.maximum(_magnitude(wide_one), _magnitude(wide_two))
            relative = np.where(gap > 0, gap / size, 0.0)
            # Infinity minus itself is NaN: what is equal has no gap.
            equal = wide_one == wide_two
            gap, relative = np.where(equal, 0.0, gap), np.where(equal, 0.0, relative)
            near = (gap <= self._tolerance.absolute) | (gap <= self._tolerance.relative * size)
        if self._tolerance.exact and same_dtype:
            counted = np.ones(len(one), bool)  # not a bit may differ
        else:
            counted = ~(equal | (nans[0] & nans[1]) | (near & np.isfinite(gap)))
        self._unequal_nans += int(np.count_nonzero(counted & (nans[0] != nans[1])))
        measured = counted & ~(nans[0] | nans[1])
        self._max_absolute = _larger(self._max_absolute, gap[measured])
        self._squares += np.square(gap[measured], dtype=np.longdouble).sum()
        self._max_relative = _larger(self._max_relative, np.nan_to_num(relative[measured], nan=1.0))
        return counted


def same_scalar(one: Any, two: Any, tolerance: Tolerance) -> bool:
    """Whether two Python scalars of one type are the same value, within the tolerance."""
    if not isinstance(one, int | float | complex) or isinstance(one, bool):
        return bool(one == two)
    if not tolerance.exact and (one == two or (one != one and two != two)):
        return True
    if tolerance.exact:
        return bool(
            one == two if isinstance(one, int) else np.asarray(one).tobytes() == np.asarray(two).tobytes()
        )
    try:
        gap, size = float(abs(one - two)), float(max(abs(one), abs(two)))
    except OverflowError:  # integers beyond what floats hold have to be equal
        return False
    return math.isfinite(gap) and gap <= max(tolerance.absolute, tolerance.relative * size)


def _unequal_bits(one: Values, two: Values) -> Values:
    """Per element, whether any bit differs."""
    size = one.nbytes // len(one) if len(one) else 0
    if size == 0:
        return np.zeros(len(one), bool)
    if size in _BIT_DTYPES:
        bits = _BIT_DTYPES[size]
        return np.asarray(
            one.reshape(-1).view(np.uint8).view(bits) != two.reshape(-1).view(np.uint8).view(bits)
        )
    rows = [values.reshape(-1).view(np.uint8).reshape(-1, size) for values in (one, two)]
    return np.asarray((rows[0] != rows[1]).any(axis=1))


def _widened(one: Values, two: Values) -> tuple[Values, Values]:
    """Both in one type that holds all of their values, as far as there is one."""
    kinds = {_kind(one), _kind(two)}
    dtype: Any
    if kinds <= {"b", "u"}:
        dtype = np.uint64
    elif kinds <= {"b", "i", "u"}:
        dtype = np.int64 if np.uint64 not in (one.dtype, two.dtype) else np.longdouble
    elif "c" in kinds:
        dtype = np.clongdouble
    else:
        dtype = np.longdouble
    return one.astype(dtype), two.astype(dtype)


def _kind(values: Values) -> str:
    """Of NumPy's kinds b, i, u, f, c; those of ml_dtypes all say V or f."""
    name, kind = str(values.dtype.name), str(values.dtype.kind)
    if kind in "biufc":
        return kind
    if "complex" in name:
        return "c"
    return "u" if name.startswith("uint") else "i" if name.startswith("int") else "f"


def _gap(one: Values, two: Values) -> Values:
    if one.dtype.kind in "iu":
        high, low = np.maximum(one, two), np.minimum(one, two)
        return (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.longdouble)
    return np.abs(one - two)


def _magnitude(values: Values) -> Values:
    return np.abs(values.astype(np.longdouble) if values.dtype.kind in "iu" else values)


def _larger(known: float | None, values: Values) -> float | None:
    if not len(values):
        return known
    largest = float(values.max())
    return largest if known is None else max(known, largest)


def _text(value: Any) -> str:
    return str(value.tolist() if isinstance(value, np.ndarray) else value)
