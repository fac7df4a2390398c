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
    pending: list[int] = []
    pending_bytes = 0
    for number, nbytes in enumerate(sizes):
        if nbytes >= OWN_SLAB_BYTES:
            slab = _native.allocate(nbytes)
            places[number] = (slab, 0)
            addresses[number] = slab.address
        elif nbytes:
            if pending_bytes + nbytes > SHARED_SLAB_BYTES:
                _share(pending, pending_bytes, sizes, places, addresses)
                pending, pending_bytes = [], 0
            pending.append(number)
            pending_bytes += _aligned(nbytes)
    if pending:
        _share(pending, pending_bytes, sizes, places, addresses)
    return places, addresses


def _share(
    numbers: list[int],
    nbytes: int,
    sizes: Sequence[int],
    places: list[tuple[_native.Slab | None, int]],
    addresses: np.ndarray,
) -> None:
    slab = _native.allocate(nbytes)
    address, offset = slab.address, 0
    for number in numbers:
        places[number] = (slab, offset)
        addresses[number] = address + offset
        offset += _aligned(sizes[number])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
