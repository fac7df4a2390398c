"""Arrays that are read to memory that the caller has, instead of memory of their own.

Invariants: no byte is given to the engine twice, since it writes in any order; what cannot be read where it
is wanted (other dtypes, extents, strides or devices, memory that an earlier array of the state has as well)
is loaded as ever, and copied.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation.frameworks.base import Codec
from waystation.layouts.opened import Place
from waystation.transfers.buffers import Incoming, Reading, fill_buffers

Bytes = NDArray[np.uint8]


def fill(reading: Reading, batches: Sequence[tuple[Codec, Sequence[Incoming]]]) -> None:
    """Fills what goes to memory of the caller; its arrays have their buffers then."""
    found: list[tuple[Incoming, Bytes]] = []
    for codec, batch in batches:
        for incoming in batch:
            memory = None if incoming.target.into is None else _memory_of(codec, incoming)
            if memory is not None:
                found.append((incoming, memory))
    taken = _Taken()
    chosen = [(incoming, memory) for incoming, memory in found if taken.take(memory)]
    if not chosen:
        return
    memories = [memory for _, memory in chosen]

    def allocate(sizes: Sequence[int]) -> tuple[list[Place], NDArray[np.int64]]:
        assert list(sizes) == [memory.nbytes for memory in memories], "one box each, in their order"
        addresses = np.array([memory.ctypes.data for memory in memories], np.int64)
        return [(memory, 0) for memory in memories], addresses

    # Mapping would make arrays of the file instead of filling these.
    fill_buffers(replace(reading, mappings=None), [incoming for incoming, _ in chosen], allocate)


def put(codec: Codec, arrays: Sequence[Incoming], leaves: Sequence[Any]) -> Sequence[Any]:
    """Finished leaves, or in their place the arrays of the caller, which have their values then."""
    own = codec.in_place
    return [
        leaf if own is None or incoming.target.into is None else own.put_into(incoming.target, leaf)
        for incoming, leaf in zip(arrays, leaves, strict=True)
    ]


def _memory_of(codec: Codec, incoming: Incoming) -> Bytes | None:
    """Where the whole array can be read to, if it can."""
    if codec.in_place is None or incoming.buffers or not incoming.is_plain:
        return None
    memory = codec.in_place.memory_of(incoming.target)
    if memory is None or incoming.box_bytes() != [memory.nbytes]:
        return None
    return memory


class _Taken:
    """Memory that is to be written, as intervals in order that do not touch each other's bytes."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def take(self, memory: Bytes) -> bool:
        """Takes the memory, unless a part of it is taken."""
        begin = memory.ctypes.data
        end = begin + memory.nbytes
        at = bisect.bisect_left(self._begins, end)
        if at > 0 and self._ends[at - 1] > begin:
            return False
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        return True
