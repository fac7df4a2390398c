"""The index of a `sharding_indexed` chunk: for every inner chunk where it begins and how long it is.

Pairs of 64-bit integers, little-endian, in the order of the inner grid; both are all ones for an inner chunk
that is not there. Invariant: what is read lies inside of the file and outside of the index, whose checksum
was right if it has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._errors import Corrupt
from waystation.layouts.orbax.zarr import ZarrArray

ABSENT = (1 << 64) - 1
_ENTRY_BYTES, _CHECKSUM_BYTES = 16, 4


def inner_counts(array: ZarrArray) -> tuple[int, ...]:
    """The number of inner chunks of a chunk along each axis."""
    return tuple(outer // inner for outer, inner in zip(array.chunk_shape, array.read_shape, strict=True))


def index_bytes(array: ZarrArray) -> int:
    """The length of the index of a chunk."""
    checksum = _CHECKSUM_BYTES if array.index.has_checksum else 0
    return math.prod(inner_counts(array)) * _ENTRY_BYTES + checksum


def encode(offsets: Sequence[int], lengths: Sequence[int], *, has_checksum: bool = True) -> bytes:
    """The bytes of an index."""
    entries = np.array([offsets, lengths], "<u8").T.tobytes()
    return entries + _native.crc32c(entries).to_bytes(_CHECKSUM_BYTES, "little") if has_checksum else entries


def decode(data: bytes | memoryview, array: ZarrArray, file_bytes: int, path: str) -> NDArray[np.int64]:
    """The offset and length of every inner chunk, -1 for what is not there.

    Args:
        data: The bytes of the index.
        array: Whose chunk it is.
        file_bytes: Of the chunk, with its index.
        path: Of the chunk, for messages.

    Raises:
        Corrupt: The index is damaged, or speaks of bytes that are not in the file.
    """
    if array.index.has_checksum:
        data, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if _native.crc32c(data) != int.from_bytes(checksum, "little"):
            raise Corrupt(f"the index of '{path}' is damaged: its checksum differs", path=path)
    entries = np.frombuffer(data, "<u8").reshape(-1, 2)
    is_absent = (entries == ABSENT).all(axis=1)
    offsets, lengths = entries[:, 0], entries[:, 1]
    own_bytes = index_bytes(array)
    begin, end = (0, file_bytes - own_bytes) if array.index.is_at_end else (own_bytes, file_bytes)
    is_inside = (offsets >= begin) & (offsets <= end) & (lengths <= end - np.minimum(offsets, end))
    if not (is_inside | is_absent).all():
        worst = int(np.argmin(is_inside | is_absent))
        raise Corrupt(f"the index of '{path}' places inner chunk {worst} outside of its data", path=path)
    return np.where(is_absent[:, None], -1, entries.astype(np.int64))
