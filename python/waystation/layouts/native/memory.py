"""Destination memory for a load: few slabs for many arrays, every array well aligned.

Large arrays get a slab of their own, so that dropping one gives its memory back. Small ones share
slabs of at most 64 MiB, so that one survivor can pin no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from waystation import _native
from waystation._collection import paused_collection

ALIGN_BYTES = 256
OWN_SLAB_BYTES = 1 << 20
SHARED_SLAB_BYTES = 64 << 20


@paused_collection()
def allocate(sizes: Sequence[int]) -> tuple[list[tuple[_native.Slab | None, int]], np.ndarray]:
    """Places buffers of the given sizes (bytes).

    Returns:
        `(slab, offset)` for each, no slab where the size is 0, and the int64 addresses.
    """
    places: list[tuple[_native.Slab | None, int]] = [(None, 0)] * len(sizes)
    addresses = np.zeros(len(sizes), np.int64)
    lengths = np.asarray(sizes, np.int64)
    for number in np.flatnonzero(lengths >= OWN_SLAB_BYTES).tolist():
        slab = _native.allocate(sizes[number])
        places[number] = (slab, 0)
        addresses[number] = slab.address
    small = np.flatnonzero((lengths > 0) & (lengths < OWN_SLAB_BYTES))
    room = -(-lengths[small] // ALIGN_BYTES) * ALIGN_BYTES
    ends = np.cumsum(room)
    start = held = 0
    while start < len(small):
        stop = int(np.searchsorted(ends, held + SHARED_SLAB_BYTES, side="right"))
        numbers, offsets = small[start:stop], (ends - room)[start:stop] - held
        slab = _native.allocate(int(ends[stop - 1]) - held)
        addresses[numbers] = slab.address + offsets
        for number, offset in zip(numbers.tolist(), offsets.tolist(), strict=True):
            places[number] = (slab, offset)
        start, held = stop, int(ends[stop - 1])
    return places, addresses
