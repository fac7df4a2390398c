"""Arrays that are read to memory that the caller has, instead of memory of their own.

Invariants: no byte is given to the engine twice, since it writes in any order; what cannot be read where it
is wanted (other dtypes, extents, strides or devices, memory that an earlier array of the state has as well)
is loaded as ever, and copied.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from waystation.frameworks.base import ArraySource, Codec, StoredArray, Target
from waystation.layouts.native.memory import form_of
from waystation.layouts.opened import Place
from waystation.transfers.buffers import Buffer, Incoming, Reading, fill_buffers

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Given:
    """Arrays of the caller that lie in host memory in one piece, and share none of it: in columns.

    Attributes:
        codec: What knows them.
        leaves: The arrays.
        addresses: Where each begins.
        sizes: Its bytes.
        owners: What keeps its memory alive.
    """

    codec: Codec
    leaves: Sequence[object]
    addresses: NDArray[np.int64]
    sizes: NDArray[np.int64]
    owners: Sequence[object]


def given(
    codec: Codec, leaves: Sequence[object], stored: Sequence[StoredArray], targets: Sequence[Target]
) -> tuple[list[int], Given] | None:
    """Which leaves are such arrays, of the dtype and shape that is stored, and these; None where some share
    memory, or none is such an array."""
    found = codec.contiguous(leaves)
    if found is None or codec.in_place is None:
        return None
    rows = list(zip(found.which.tolist(), map(id, stored), map(id, targets), strict=True))
    sizes: dict[tuple[int, int, int], int] = {}
    for row, array, target in zip(rows, stored, targets, strict=True):
        if row not in sizes:
            sizes[row] = _bytes_if_same(None if row[0] < 0 else found.kinds[row[0]], array, target)
    may_write = codec.in_place.may_write
    chosen = [place for place, row in enumerate(rows) if sizes[row] and may_write(leaves[place])]
    own = Given(
        codec,
        [leaves[place] for place in chosen],
        found.addresses[chosen],
        np.array([sizes[rows[place]] for place in chosen], np.int64),
        [found.owners[place] for place in chosen],
    )
    order = np.argsort(own.addresses)
    ends = (own.addresses + own.sizes)[order]
    return None if not chosen or np.any(ends[:-1] > own.addresses[order][1:]) else (chosen, own)


def _bytes_if_same(kind: ArraySource | None, stored: StoredArray, target: Target) -> int:
    """The bytes of such an array; 0 if it is none, or is empty."""
    if kind is None or not kind.dtype == stored.dtype == target.dtype:
        return 0
    return form_of(stored).nbytes if kind.shape == stored.shape == target.shape else 0


def fill_given(reading: Reading, arrays: Sequence[int], given: Given, taken: Taken) -> None:
    """Reads stored arrays, given by number, into arrays of the caller."""
    read = reading.opened.read_over
    assert read is not None, "it was asked before"
    assert given.codec.in_place is not None, "its arrays are loaded into"

    def allocate(sizes: Sequence[int]) -> tuple[list[Place], NDArray[np.int64]]:
        assert list(sizes) == given.sizes.tolist(), "each array has its own size"
        return [(owner, 0) for owner in cast("list[Buffer]", given.owners)], given.addresses

    reading.check_cancelled()
    taken.take_all(given.addresses, given.sizes)
    read(
        arrays,
        reading.options,
        reading.progress.add,
        reading.statistics,
        lambda slabs, _: slabs,
        allocate=allocate,
    )
    given.codec.in_place.wrote(given.owners)


def fill(reading: Reading, batches: Sequence[tuple[Codec, Sequence[Incoming]]], taken: Taken) -> None:
    """Fills what goes to memory of the caller, as far as it is not taken; its arrays have their buffers
    then."""
    found: list[tuple[Incoming, Bytes]] = []
    for codec, batch in batches:
        for incoming in batch:
            memory = None if incoming.target.into is None else _memory_of(codec, incoming)
            if memory is not None:
                found.append((incoming, memory))
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


@dataclass(frozen=True, slots=True)
class Span:
    """Memory of the caller in one piece that one array is loaded into.

    Attributes:
        leaf: The number of its leaf.
        begin: Its address.
        end: That of what follows it.
    """

    leaf: int
    begin: int
    end: int


def spans_of(codec: Codec, leaves: Sequence[int], targets: Sequence[Target], own: Given | None) -> list[Span]:
    """Where arrays go that are loaded into memory of the caller, as far as that is in one piece each.

    Args:
        codec: What knows them.
        leaves: The numbers of their leaves.
        targets: Where they go.
        own: The memory of all of them, if that is known.
    """
    if own is not None:
        ends = own.addresses + own.sizes
        return list(map(Span, leaves, own.addresses.tolist(), ends.tolist()))
    found = []
    for leaf, target in zip(leaves, targets, strict=True):
        span = None if target.into is None or codec.in_place is None else codec.in_place.span_of(target)
        if span is not None:
            found.append(Span(leaf, *span))
    return found


def first_crossing(spans: Sequence[Span]) -> tuple[int, int] | None:
    """Two leaves whose memory overlaps in a part of each, if there are such.

    The values of one would be written over with those of the other. What is the same memory, or lies within
    another's, is none: such arrays are tied, and were saved with equal values.
    """
    around: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while around and around[-1].end <= span.begin:
            around.pop()
        if around and around[-1].end < span.end:
            return min(around[-1].leaf, span.leaf), max(around[-1].leaf, span.leaf)
        around.append(span)
    return None


def put(codec: Codec, targets: Sequence[Target], leaves: Sequence[Any]) -> Sequence[Any]:
    """Finished leaves, or in their place the arrays of the caller, which have their values then."""
    own = codec.in_place
    return [
        leaf if own is None or target.into is None else own.put_into(target, leaf)
        for target, leaf in zip(targets, leaves, strict=True)
    ]


def _memory_of(codec: Codec, incoming: Incoming) -> Bytes | None:
    """Where the whole array can be read to, if it can."""
    if codec.in_place is None or incoming.buffers or not incoming.is_plain:
        return None
    memory = codec.in_place.memory_of(incoming.target)
    if memory is None or incoming.box_bytes() != [memory.nbytes]:
        return None
    return memory


class Taken:
    """Memory that is to be written, as intervals in order that do not touch each other's bytes."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def take_all(self, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Takes memory of which no part is taken."""
        order = np.argsort(addresses)
        self._begins += addresses[order].tolist()
        self._ends += (addresses + sizes)[order].tolist()
        self._begins.sort()
        self._ends.sort()

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
