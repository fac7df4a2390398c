"""Bounds the host memory that a load takes beyond its result (`memory.read_concurrent_bytes`).

What makes up the bound: arrays whose final place is not the host memory that they are read to are
*staged*: read in groups, each made into arrays of its framework and let go of before the next but one is
read. A staged array larger than a group goes in pieces where its codec can put an array together on its
device; where it cannot, the array is read alone, whatever its size. Pieces that are cast
(`transfers/buffers.py`) and the engine's own memory have shares of their own. A bound never makes a load
fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from waystation import _native
from waystation._options import Options
from waystation._threads import processor_count
from waystation.frameworks.base import Codec, PieceWriter
from waystation.grid import volume
from waystation.transfers.buffers import Incoming, Reading, Region, aligned, fill_buffers
from waystation.transfers.pieces import cut, read_ahead

LEAST_BYTES = 2 << 20  # a few blocks of the files, which are read whole
CAST_GROUP_BYTES = 32 << 20  # also where memory has no bound
_GROUP_MOST_BYTES = 1 << 30  # larger ones would only make the first of them come later
_REQUEST_BYTES = 1 << 20
_MOST_REQUESTS = 16
_ENGINE_BYTES = 160 << 20  # what the engine takes at most of its own accord


# ---- shares of the bound -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """What may be taken for what. Of staged groups and of groups of cast pieces two exist at a time.

    Attributes:
        group_bytes: For a group of staged arrays.
        cast_bytes: For a group of pieces that are cast.
        engine_bytes: For the engine's own memory.
    """

    group_bytes: int
    cast_bytes: int
    engine_bytes: int

    @classmethod
    def of(cls, limit_bytes: int, *, are_staged: bool, are_cast: bool = True) -> Shares:
        """Divides a bound. Where no array is staged, casts have that share too; without them the engine has
        all."""
        eighth = max(limit_bytes, LEAST_BYTES) // 8 // 4096 * 4096
        if not are_staged and not are_cast:
            return cls(0, 0, 8 * eighth)
        cast_bytes = eighth if are_staged else 3 * eighth
        return cls(min(2 * eighth, _GROUP_MOST_BYTES), min(cast_bytes, CAST_GROUP_BYTES), 2 * eighth)


def bound_engine(options: Options, nbytes: int) -> Options:
    """The options with requests so few and small that the engine stays within `nbytes`."""
    if nbytes >= _ENGINE_BYTES:
        return options
    bounded = options.thawed()
    engine = bounded.engine
    # The engine reads whole blocks; each worker may have one request more than its share of those in flight.
    block = _native.BLOCK_BYTES
    most_bytes = min(engine.block_bytes or _REQUEST_BYTES, _REQUEST_BYTES, nbytes // 2)
    engine.block_bytes = max(block, most_bytes // block * block)
    requests = max(1, nbytes // 2 // engine.block_bytes)
    engine.depth = min(engine.depth or _MOST_REQUESTS, _MOST_REQUESTS, requests)
    engine.threads = min(engine.threads or processor_count(), requests)
    return bounded.frozen()


# ---- groups ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Staged:
    """An array that is staged.

    Attributes:
        codec: What makes it.
        incoming: Its boxes and their buffers.
        nbytes: The host memory that these take.
        writer: What puts it together, if it goes in parts.
        items_left: Elements that are still to be put.
    """

    codec: Codec
    incoming: Incoming
    nbytes: int
    writer: PieceWriter | None = None
    items_left: int = 0

    def put(self, part: Part) -> Any:
        """Puts a part that was read into the array. Returns that once it has all parts, until then None."""
        assert self.writer is not None
        (values,) = part.incoming.buffers
        self.writer.put(part.box_number, part.offset, values)
        self.items_left -= volume(part.incoming.target.boxes[0])
        return self.writer.finish() if self.items_left == 0 else None


@dataclass(slots=True)
class Part:
    """A part of an array that is too large for a group."""

    whole: Staged
    incoming: Incoming  # its target is the part alone
    box_number: int
    offset: tuple[int, ...]  # in that box


@dataclass(slots=True)
class Group:
    """Arrays and parts of arrays that are read, and then made, together; and the host memory for that."""

    arrays: list[Staged] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0

    def fill(self, reading: Reading, nbytes: int) -> None:
        """Reads the group to a region of `nbytes`, or of what it takes if that is more."""
        incoming = [staged.incoming for staged in self.arrays] + [part.incoming for part in self.parts]
        fill_buffers(reading, incoming, Region(max(nbytes, self.nbytes)).allocate)

    def make(self, maker: Maker) -> None:
        """Makes arrays of what was read, and lets go of it."""
        by_codec: dict[str, list[Staged]] = {}
        for staged in self.arrays:
            by_codec.setdefault(staged.codec.name, []).append(staged)
        for arrays in by_codec.values():
            maker.make(arrays[0].codec, [staged.incoming for staged in arrays], wait=True)
        for part in self.parts:
            maker.put(part)
        for staged in self.arrays:
            staged.incoming.buffers = []
        for part in self.parts:
            part.incoming.buffers = []


class Maker(Protocol):
    """Makes leaves and puts them where they belong."""

    def keep(self, numbers: Sequence[int], leaves: Sequence[Any]) -> None:
        """Takes leaves, given by number, that are made already."""
        ...

    def make(self, codec: Codec, arrays: Sequence[Incoming], *, wait: bool) -> None:
        """Makes leaves of filled buffers; if told so, waits until they no longer need these."""
        ...

    def put(self, part: Part) -> None:
        """Puts a part into its array."""
        ...


def load_staged(
    reading: Reading, arrays: Iterable[tuple[Codec, Incoming]], group_bytes: int, maker: Maker
) -> None:
    """Reads and makes staged arrays, group after group; the next is read while one is made."""
    staged = [Staged(codec, incoming, _staged_bytes(incoming)) for codec, incoming in arrays]
    region_bytes = min(group_bytes, sum(one.nbytes for one in staged))
    alone: list[Staged] = []
    groups = _groups(staged, group_bytes, alone)
    with contextlib.closing(read_ahead(groups, lambda group: group.fill(reading, region_bytes))) as filled:
        for group, _ in filled:
            group.make(maker)
    for one in alone:
        group = Group([one], nbytes=one.nbytes)
        group.fill(reading, 0)
        group.make(maker)
        _native.trim_arena()  # which would keep memory of each of their sizes


def _groups(arrays: Iterable[Staged], group_bytes: int, alone: list[Staged]) -> Iterator[Group]:
    """Groups of at most `group_bytes`. What is larger and cannot go in parts is left to `alone`."""
    group = Group()
    for staged in arrays:
        incoming = staged.incoming
        if staged.nbytes <= group_bytes:
            if group.nbytes + staged.nbytes > group_bytes:
                yield group
                group = Group()
            group.arrays.append(staged)
            group.nbytes += staged.nbytes
            continue
        staged.writer = staged.codec.open_in_pieces(incoming.target)
        if staged.writer is None:
            alone.append(staged)
            continue
        staged.items_left = sum(volume(box) for box in incoming.target.boxes)
        for part in _parts(staged, group_bytes):
            nbytes = _staged_bytes(part.incoming)
            if group.nbytes + nbytes > group_bytes:
                yield group
                group = Group()
            group.parts.append(part)
            group.nbytes += nbytes
    if group.arrays or group.parts:
        yield group


def _parts(staged: Staged, group_bytes: int) -> Iterator[Part]:
    incoming = staged.incoming
    items = max(1, group_bytes // incoming.item_bytes)
    for number, (origin, shape) in enumerate(incoming.target.boxes):
        for offset, extents in cut(shape, items):
            start = tuple(at + begin for at, begin in zip(offset, origin, strict=True))
            target = dataclasses.replace(incoming.target, boxes=[(start, extents)])
            part = dataclasses.replace(incoming, target=target, buffers=[])
            yield Part(staged, part, number, offset)


def _staged_bytes(incoming: Incoming) -> int:
    return sum(aligned(nbytes) for nbytes in incoming.box_bytes())
