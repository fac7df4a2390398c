"""What the values of one array are like: extremes, mean, what is not finite, a histogram. Read in ranges.

An array is cut into pieces that lie in one range of a chunk each. Without a limit all are read, one after
another; with one, pieces that are spread evenly over the array, until the next could exceed it. Invariants:
memory holds one piece, however large the array is; equal values give equal histograms in whatever order they
come, since bins are aligned to powers of two and only ever joined; every block that is read is verified.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.grid import Box
from waystation.layouts.native import memory
from waystation.layouts.opened import Opened, ReadStatistics, Request
from waystation.transfers.pieces import Cut, buffer_item_bytes, cut

Values = npt.NDArray[Any]
OnProgress = Callable[[int, int], None]

LIMIT_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20
_BLOCK_BYTES = 256 << 10  # that are verified, and so read, as a whole
_BLOCK_ITEMS = 1 << 18
_SHOWN_VALUES = 8
_SHOWN_CHARACTERS = 60
_GOLDEN = (math.sqrt(5) - 1) / 2
_LARGE = 1e150  # whose square floats hardly hold, as that of its inverse
_FURTHEST = 2.0**1022  # beyond which the edges of bins could be infinite


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values lie where. Bins are equally wide, a power of two.

    Attributes:
        begin: Where the first bin begins. What lies beyond 4e307 is counted as if it were that.
        width: Of each bin.
        counts: Of the values in each.
    """

    begin: float
    width: float
    counts: list[int]


@dataclass(frozen=True, slots=True)
class ArrayStatistics:
    """What was found of an array.

    Attributes:
        elements: Elements of the array.
        examined: Those that were read: all of them, or a sample.
        bytes_read: Bytes that were read for that, of whole blocks and of headers of files.
        of: What the numbers are of: `values`; `magnitudes` of complex numbers; None where elements are no
            numbers (keys, text, packed bytes), and all that follows but `first_values` is empty.
        minimum: Of finite values; None if there are none. So are `maximum`, `mean`, `deviation`, `norm`.
        maximum: Likewise.
        mean: Likewise.
        deviation: The standard deviation.
        norm: The Euclidean norm, of what was examined.
        zeros: Values that are zero.
        nans: Values that are NaN.
        positive_infinities: Values that are infinite.
        negative_infinities: Likewise, below zero.
        histogram: Of finite values.
        first_values: The first elements of the array, as text.
    """

    elements: int
    examined: int
    bytes_read: int
    of: str | None
    minimum: float | int | None
    maximum: float | int | None
    mean: float | None
    deviation: float | None
    norm: float | None
    zeros: int
    nans: int
    positive_infinities: int
    negative_infinities: int
    histogram: Histogram | None
    first_values: list[str]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)


def statistics_of(
    opened: Opened,
    number: int,
    options: Options,
    *,
    limit_bytes: int | None = LIMIT_BYTES,
    on_progress: OnProgress = lambda _done, _total: None,
) -> ArrayStatistics:
    """Reads an array, or a sample of it, and tells what its values are like.

    Args:
        opened: The state.
        number: Of the array.
        options: How to read.
        limit_bytes: Read no more than this, of blocks and of headers of files; None for all of the array. At
            least one piece is read, of which a layout may have to read a whole chunk.
        on_progress: Called with `(bytes of elements read, bytes to read)`. Ends the work by what it raises.

    Raises:
        Corrupt: A block is damaged.
        NotFound, Unavailable: The files have gone, or cannot be reached.
    """
    stored = opened.tree.arrays[number]
    form = dtypes.of_stored(stored)
    item_bytes = max(1, buffer_item_bytes(opened, number))
    whole_bytes = math.prod(stored.shape) * item_bytes
    chunk = opened.storage_metadata(number).chunk_shape
    piece_bytes = _PIECE_BYTES if limit_bytes is None else _SAMPLE_BYTES
    pieces = _Pieces(stored.shape, chunk, piece_bytes // item_bytes)
    total = whole_bytes if limit_bytes is None else min(whole_bytes, limit_bytes)
    tally, read, first = _Tally(form), ReadStatistics(), list[str]()
    header_bytes = done = 0
    for box in pieces.in_order() if limit_bytes is None else pieces.spread():
        before = read.bytes_read
        # Another chunk may be in another file, whose header is read as well.
        next_bytes = piece_bytes + 2 * _BLOCK_BYTES + (0 if pieces.in_one_chunk else header_bytes)
        if limit_bytes is not None and before and before + next_bytes > limit_bytes:
            break
        request = Request(number, [box])
        ((values,),) = opened.read_boxes([request], options, lambda _job: None, read, memory.allocate)
        header_bytes = max(header_bytes, read.bytes_read - before - piece_bytes - 2 * _BLOCK_BYTES)
        flat = values.reshape(math.prod(box[1]), *form.host_trailing)
        if not any(box[0]):
            first = [_text(value) for value in flat[:_SHOWN_VALUES]]
        tally.add(flat)
        done += flat.nbytes
        on_progress(min(done, total), total)
    return tally.found(math.prod(stored.shape), read.bytes_read, first)


def _text(value: Any) -> str:
    text = str(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


# ---- pieces ------------------------------------------------------------------------------------


class _Pieces:
    """The pieces of an array, by number: parts of chunks, each contiguous in its chunk.

    Args:
        shape: Of the array.
        chunk: Of its chunks; None where these differ, and the array is cut as if it were one.
        most_items: Of a piece, as far as there are so many in a chunk.
    """

    def __init__(self, shape: tuple[int, ...], chunk: tuple[int, ...] | None, most_items: int) -> None:
        self._shape = shape
        self._is_cut_evenly = chunk is not None
        self._chunk = shape if chunk is None or 0 in chunk else chunk
        self._in_chunk: Cut = cut(self._chunk, max(1, most_items))
        self._grid = tuple(
            -(-extent // part) if part else 0 for extent, part in zip(shape, self._chunk, strict=True)
        )
        self._count = math.prod(self._grid) * len(self._in_chunk)

    @property
    def in_one_chunk(self) -> bool:
        """Whether all of them are known to be."""
        return self._is_cut_evenly and math.prod(self._grid) == 1

    def in_order(self) -> Iterator[Box]:
        """All of them."""
        for number in range(self._count):
            yield from self._box(number)

    def spread(self) -> Iterator[Box]:
        """As many as are asked for, the first one first, spread evenly however many those are."""
        seen: set[int] = set()
        for turn in range(3 * self._count):  # after which none is left
            number = int(self._count * (turn * _GOLDEN % 1.0))
            if number not in seen:
                seen.add(number)
                yield from self._box(number)

    def _box(self, number: int) -> Iterator[Box]:
        """The box of a piece within the array; none of a piece that lies beyond its end."""
        place, part = divmod(number, len(self._in_chunk))
        offset, extents = self._in_chunk[part]
        corner: list[int] = []
        for count in reversed(self._grid):
            place, index = divmod(place, count)
            corner.insert(0, index)
        begins = tuple(
            index * size + begin for index, size, begin in zip(corner, self._chunk, offset, strict=True)
        )
        inside = tuple(
            min(extent, whole - begin)
            for extent, whole, begin in zip(extents, self._shape, begins, strict=True)
        )
        if all(extent > 0 for extent in inside):
            yield begins, inside


# ---- values ------------------------------------------------------------------------------------


class _Tally:
    """Counts up values as they come."""

    def __init__(self, form: dtypes.LogicalDtype) -> None:
        self._category = form.category
        self._wide = _wide_dtype(form)
        self._histogram = _Bins(least_exponent=0 if form.category in ("bool", "integer") else None)
        self._examined = self._finite = 0
        self._zeros = self._nans = self._positive = self._negative = 0
        self._minimum: float | int | None = None
        self._maximum: float | int | None = None
        self._mean = np.longdouble(0)
        self._squares = np.longdouble(0)  # of distances from the mean

    def add(self, values: Values) -> None:
        """Counts elements, which are along the first axis."""
        self._examined += len(values)
        if self._wide is None:
            return
        with np.errstate(all="ignore"):
            for begin in range(0, len(values), _BLOCK_ITEMS):
                self._add_block(values[begin : begin + _BLOCK_ITEMS].astype(self._wide))

    def found(self, elements: int, bytes_read: int, first_values: list[str]) -> ArrayStatistics:
        """What was counted."""
        mean = deviation = norm = None
        if self._finite:
            with np.errstate(all="ignore"):
                mean = float(self._mean)
                deviation = float(np.sqrt(self._squares / self._finite))
                norm = float(np.sqrt(self._squares + self._finite * self._mean * self._mean))
        of = "magnitudes" if self._category == "complex" else "values"
        return ArrayStatistics(
            elements,
            self._examined,
            bytes_read,
            None if self._wide is None else of,
            self._minimum,
            self._maximum,
            mean,
            deviation,
            norm,
            self._zeros,
            self._nans,
            self._positive,
            self._negative,
            self._histogram.found(),
            first_values,
        )

    def _add_block(self, values: Values) -> None:
        if values.dtype.kind == "c":
            is_nan = np.isnan(values)
            values = np.abs(values)
            values[is_nan] = np.nan  # NumPy has the magnitude of what is infinite and NaN as infinite
        self._zeros += int(np.count_nonzero(values == 0))
        if values.dtype.kind == "f":
            self._nans += int(np.count_nonzero(np.isnan(values)))
            self._positive += int(np.count_nonzero(np.isposinf(values)))
            self._negative += int(np.count_nonzero(np.isneginf(values)))
            values = values[np.isfinite(values)]
        if not len(values):
            return
        lowest, highest = values.min().item(), values.max().item()
        if not isinstance(lowest, int):
            lowest, highest = float(lowest), float(highest)
        self._minimum = lowest if self._minimum is None else min(self._minimum, lowest)
        self._maximum = highest if self._maximum is None else max(self._maximum, highest)
        largest = max(abs(float(lowest)), abs(float(highest)))
        is_extreme = largest > _LARGE or 0 < largest < 1 / _LARGE
        self._add_moments(values.astype(np.longdouble if is_extreme else np.float64, copy=False))
        self._histogram.add(np.clip(values, -_FURTHEST, _FURTHEST) if is_extreme else values)

    def _add_moments(self, values: Values) -> None:
        count = len(values)
        mean = np.longdouble(values.mean())
        squares = np.longdouble(np.square(values - values.dtype.type(mean)).sum())
        gap, total = mean - self._mean, self._finite + count
        self._squares += squares + gap * gap * self._finite * count / total
        self._mean += gap * count / total
        self._finite = total


def _wide_dtype(form: dtypes.LogicalDtype) -> Any:
    """A dtype of NumPy that holds the numbers of a logical one; None if its elements are no numbers."""
    if form.category == "bool":
        return np.uint8
    if form.category == "integer":
        return np.uint64 if form.host.kind == "u" or form.name.startswith("uint") else np.int64
    if form.category == "float":
        return np.longdouble if form.host.kind == "f" and form.host.itemsize > 8 else np.float64
    if form.category == "complex":
        return np.clongdouble if form.host.kind == "c" and form.host.itemsize > 16 else np.complex128
    return None


class _Bins:
    """A histogram of which neither the range nor the number of values is known in advance.

    Bins are as narrow as the range of all values allows with so many of them. They begin at multiples of
    their width, so that two neighbours are exactly one bin of twice the width.

    Args:
        least_exponent: The least width is 2 to this; None if any will do.
    """

    _MOST = 64

    def __init__(self, least_exponent: int | None) -> None:
        self._least = least_exponent
        self._exponent = 0
        self._first = 0
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._range: tuple[float, float] | None = None

    def add(self, values: Values) -> None:
        """Counts finite values."""
        values = values.astype(np.float64, copy=False)
        lowest, highest = float(values.min()), float(values.max())
        known = self._range or (lowest, highest)
        self._range = min(lowest, known[0]), max(highest, known[1])
        self._fit(self._exponent_for(*self._range))
        scaled = np.ldexp(values, -self._exponent)
        places = np.floor(scaled).astype(np.int64) - self._first
        places -= (values < 0) & (scaled == 0)  # what is too small beside others is below zero all the same
        self._counts += np.bincount(places, minlength=len(self._counts))

    def found(self) -> Histogram | None:
        """What was counted."""
        if self._range is None:
            return None
        begin = math.ldexp(self._first, self._exponent)
        return Histogram(begin, math.ldexp(1, self._exponent), self._counts.tolist())

    def _exponent_for(self, lowest: float, highest: float) -> int:
        finest = math.frexp(math.ulp(max(abs(lowest), abs(highest))))[1] - 1
        exponent = finest if self._least is None else max(finest, self._least)
        half_range = highest / 2 - lowest / 2
        if half_range:
            exponent = max(exponent, math.frexp(half_range)[1] - self._MOST.bit_length())
        while _bin(highest, exponent) - _bin(lowest, exponent) >= self._MOST:
            exponent += 1
        return exponent

    def _fit(self, exponent: int) -> None:
        """Widens bins, and adds some at the ends, so that the range has room."""
        assert self._range is not None
        earlier = np.flatnonzero(self._counts)
        places = [(self._first + int(place)) >> (exponent - self._exponent) for place in earlier]
        first, last = _bin(self._range[0], exponent), _bin(self._range[1], exponent)
        counts = np.zeros(last - first + 1, np.int64)
        for place, count in zip(places, self._counts[earlier].tolist(), strict=True):
            counts[place - first] += count
        self._exponent, self._first, self._counts = exponent, first, counts


def _bin(value: float, exponent: int) -> int:
    scaled = math.ldexp(value, -exponent)
    return -1 if value < 0 and scaled == 0 else math.floor(scaled)
