"""Destination memory for a load: few slabs for many arrays, every array well aligned.

Large arrays get a slab of their own, so that dropping one gives its memory back. Smaller ones share slabs:
below the size of a huge page the system gives out memory by 4 KiB, and faulting that in takes longer than
a fast disk takes to fill it. A slab that is shared by medium ones is at most 16 MiB, by small ones at
most 64 MiB: one survivor can pin no more than that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._collection import paused_collection
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.layouts.opened import Place, Slabs

ALIGN_BYTES = 256
MEDIUM_BYTES = 1 << 20
OWN_SLAB_BYTES = 4 << 20
SMALL_SLAB_BYTES = 64 << 20
MEDIUM_SLAB_BYTES = 16 << 20
_PAGE_BYTES = 4096  # what begins at a page can be read to past the page cache


def release_memory() -> int:
    """Gives the memory that this process keeps for its next saves and loads back to the system.

    Memory of arrays that were loaded stays with the process once they are dropped, at most a quarter of what
    it may use: to be used again, it need not be provided again. What arrays have that are alive stays.

    Returns:
        How many bytes that were.
    """
    return _native.trim_arena()


def as_array(place: Place, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The array at a place."""
    held, offset = place
    if held is None:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, held, offset)


class Form(NamedTuple):
    """How host memory has an array.

    Attributes:
        shape: With the trailing axes of dtypes without a NumPy equal.
        dtype: Of NumPy.
        nbytes: Of all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int


def form_of(stored: StoredArray) -> Form:
    """How host memory has an array as it is stored."""
    return _form(stored.shape, dtypes.of_stored(stored))


def form_of_cast(stored: StoredArray, dtype: str, shape: tuple[int, ...] | None = None) -> Form:
    """How it has such an array, or a part of it with its own shape, in another dtype."""
    logical = dtypes.of_name(dtype, stored.storage_shape[len(stored.shape) :])
    return _form(stored.shape if shape is None else shape, logical)


def _form(shape: tuple[int, ...], logical: dtypes.LogicalDtype) -> Form:
    own = shape + logical.host_trailing
    return Form(own, logical.host, math.prod(own) * logical.host.itemsize)


def arrays_over(
    forms: Sequence[Form], slabs: Sequence[_native.Slab | None], offsets: Sequence[int]
) -> list[NDArray[Any]]:
    """Arrays over parts of slabs, which they keep."""
    array: Callable[..., NDArray[Any]] = np.ndarray
    shapes, hosts = (map(operator.itemgetter(field), forms) for field in (0, 1))
    return list(map(array, shapes, hosts, slabs, offsets))


@paused_collection()
def allocate(sizes: Sequence[int]) -> tuple[Slabs, NDArray[np.int64]]:
    """Places buffers of the given sizes (bytes).

    Returns:
        `(slab, offset)` for each, no slab where the size is 0, and the int64 addresses.
    """
    slabs, offsets, addresses = place(np.asarray(sizes, np.int64))
    return list(zip(slabs, offsets, strict=True)), addresses


def place(
    lengths: NDArray[np.int64],
) -> tuple[list[_native.Slab | None], list[int], NDArray[np.int64]]:
    """Places buffers of the given lengths (bytes), as `allocate` does: in columns."""
    slabs: list[_native.Slab | None] = []
    which = np.full(len(lengths), -1, np.int64)
    offsets = np.zeros(len(lengths), np.int64)
    for number in np.flatnonzero(lengths >= OWN_SLAB_BYTES).tolist():
        which[number] = len(slabs)
        slabs.append(_native.allocate(int(lengths[number])))
    is_medium = (lengths >= MEDIUM_BYTES) & (lengths < OWN_SLAB_BYTES)
    is_small = (lengths > 0) & (lengths < MEDIUM_BYTES)
    for chosen, align_bytes, slab_bytes in (
        (is_medium, _PAGE_BYTES, MEDIUM_SLAB_BYTES),
        (is_small, ALIGN_BYTES, SMALL_SLAB_BYTES),
    ):
        numbers = np.flatnonzero(chosen)
        room = -(-lengths[numbers] // align_bytes) * align_bytes
        _share(numbers, room, slab_bytes, slabs, which, offsets)
    slabs.append(None)  # the last one: that of what has no bytes
    starts = [0 if slab is None else slab.address for slab in slabs]
    addresses = np.array(starts, np.int64)[which] + offsets
    return list(map(slabs.__getitem__, which.tolist())), offsets.tolist(), addresses


def _share(
    numbers: NDArray[np.int64],
    room: NDArray[np.int64],
    slab_bytes: int,
    slabs: list[_native.Slab | None],
    which: NDArray[np.int64],
    offsets: NDArray[np.int64],
) -> None:
    """Places buffers that take so much room in slabs of at most so many bytes, one after another."""
    ends = np.cumsum(room)
    start = held = 0
    while start < len(numbers):
        stop = int(np.searchsorted(ends, held + slab_bytes, side="right"))
        own = numbers[start:stop]
        which[own], offsets[own] = len(slabs), (ends - room)[start:stop] - held
        slabs.append(_native.allocate(int(ends[stop - 1]) - held))
        start, held = stop, int(ends[stop - 1])
