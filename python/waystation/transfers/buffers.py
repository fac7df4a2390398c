"""Fills host memory with what arrays are to be made of.

A box that is wanted as it is stored is read straight to where it stays, all of them in one engine job. A
box that is cast, or that reaches beyond the stored array, gets its memory first and is then filled from
pieces: these are read in the stored dtype and cast into their places, while the next are read. Invariants:
at most two groups of pieces exist at a time, each of at most `Reading.cast_bytes` with everything that its
cast needs; every byte of a buffer is written.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from waystation import _native
from waystation._collection import paused_collection
from waystation._errors import Cancelled, WaystationError
from waystation._options import Options
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import StoredArray, Target
from waystation.grid import Box, relative_to, slices_of_box, volume
from waystation.layouts.native import memory
from waystation.layouts.opened import Allocate, Mapped, Opened, ReadStatistics, Request, Slabs
from waystation.transfers import fit
from waystation.transfers.handle import Progress
from waystation.transfers.pieces import cut, read_ahead, runs

Buffer = np.ndarray[Any, Any]


@dataclass(slots=True)
class Incoming:
    """An array (or a part of one) on its way into host memory.

    Attributes:
        leaf: The number of its leaf.
        stored: What the checkpoint says of it.
        array: Its number there; None for a stored scalar.
        value: That scalar as a NumPy array.
        target: The boxes that are wanted.
        buffers: One for each of the boxes, once filled.
    """

    leaf: int
    stored: StoredArray
    array: int | None
    value: Buffer | None
    target: Target
    buffers: list[Buffer] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Whether every box is wanted as it is stored."""
        return (
            self.array is not None
            and self.stored.dtype == self.target.dtype
            and tuple(self.stored.shape) == tuple(self.target.shape)
        )

    @property
    def form(self) -> dtypes.LogicalDtype:
        """What its buffers hold."""
        return dtypes.of_name(self.target.dtype, self.stored.storage_shape[len(self.stored.shape) :])

    @property
    def item_bytes(self) -> int:
        """Bytes of one logical element in its buffers."""
        form = self.form
        return form.host.itemsize * math.prod(form.host_trailing)

    def box_bytes(self) -> list[int]:
        """Bytes of each of its buffers."""
        item_bytes = self.item_bytes
        return [volume(box) * item_bytes for box in self.target.boxes]

    def only(self, numbers: Sequence[int]) -> Incoming:
        """The same array with some of its boxes, whose buffers are still to be filled."""
        boxes = [self.target.boxes[number] for number in numbers]
        return replace(self, target=replace(self.target, boxes=boxes), buffers=[])


@paused_collection()
def by_kind(is_so: Callable[[Incoming], bool], arrays: Sequence[Incoming]) -> list[bool]:
    """What is so of which arrays. That is asked once of those that share target and description: models have
    thousands of arrays, which share few."""
    targets = map(id, map(operator.attrgetter("target"), arrays))
    descriptions = map(id, map(operator.attrgetter("stored"), arrays))
    are_scalars = map(operator.is_, map(operator.attrgetter("array"), arrays), itertools.repeat(None))
    kinds = list(zip(targets, descriptions, are_scalars, strict=False))
    answers = {kind: is_so(one) for kind, one in dict(zip(kinds, arrays, strict=True)).items()}
    return list(map(answers.__getitem__, kinds))


@dataclass(frozen=True, slots=True)
class Reading:
    """What the reads of one load have in common.

    Attributes:
        opened: What is read.
        options: How.
        progress: Whom to tell about jobs, and who may cancel.
        statistics: What has been read so far.
        mappings: The mapped files; None where arrays are to be read.
        cast_bytes: What a group of pieces may take.
        is_bounded: Whether memory that is soon let go of should be the same again and again.
    """

    opened: Opened
    options: Options
    progress: Progress
    statistics: ReadStatistics
    mappings: Mapped | None
    cast_bytes: int
    is_bounded: bool

    def read(self, requests: Sequence[Request], allocate: Allocate) -> list[list[Buffer]]:
        """Reads boxes as they are stored."""
        self.check_cancelled()
        return self.opened.read_boxes(requests, self.options, self.progress.add, self.statistics, allocate)

    def check_cancelled(self) -> None:
        """Refuses to begin another job once the load was cancelled."""
        if self.progress.cancelled:
            raise Cancelled("loading was cancelled")


class Region:
    """Memory for what is soon let go of, out of one slab.

    The arena keeps what it gets back, by size. Regions of one size after another so take the memory of two;
    buffers of many sizes would leave memory of every size behind.
    """

    def __init__(self, nbytes: int) -> None:
        self._slab = _native.allocate(nbytes)
        self._used = 0

    def allocate(self, sizes: Sequence[int]) -> tuple[Slabs, np.ndarray[Any, Any]]:
        """Places buffers one after another; what is too large for the rest gets memory of its own."""
        places: Slabs = []
        addresses = np.zeros(len(sizes), np.int64)
        for number, nbytes in enumerate(sizes):
            slab, offset = self._place(nbytes) if nbytes else (None, 0)
            places.append((slab, offset))
            addresses[number] = 0 if slab is None else slab.address + offset
        return places, addresses

    def _place(self, nbytes: int) -> tuple[_native.Slab, int]:
        if self._used + nbytes > self._slab.nbytes:
            return _native.allocate(nbytes), 0
        offset = self._used
        self._used += aligned(nbytes)
        return self._slab, offset


def aligned(nbytes: int) -> int:
    """What a buffer of so many bytes takes of a region."""
    return -(-nbytes // memory.ALIGN_BYTES) * memory.ALIGN_BYTES


@dataclass(slots=True)
class _Plan:
    """How the buffers of some arrays are filled.

    Attributes:
        plain: The arrays whose boxes are read as they are stored.
        parts: Single boxes, by their numbers, that are read so of other arrays.
        made: Those that are made of pieces, or of nothing that is stored.
        mapped_bytes: What the arrays have that are mapped.
    """

    plain: list[Incoming]
    parts: list[tuple[Incoming, int]]
    made: list[tuple[Incoming, int]]
    mapped_bytes: int = 0

    @classmethod
    def of(cls, arrays: Iterable[Incoming], mappings: Mapped | None) -> _Plan:
        """That for all given arrays; those that are mapped have their buffers at once."""
        plan = cls([], [], [])
        for incoming in arrays:
            if not incoming.is_plain:
                incoming.buffers = [np.empty(0)] * len(incoming.target.boxes)
                for index, box in enumerate(incoming.target.boxes):
                    (plan.parts if _is_read(incoming, box) else plan.made).append((incoming, index))
            elif mappings is None or not _map(mappings, incoming):
                plan.plain.append(incoming)
            else:
                plan.mapped_bytes += sum(buffer.nbytes for buffer in incoming.buffers)
        return plan

    def requests(self) -> list[Request]:
        """What is read: all of the plain arrays, and then the parts."""
        boxes = [incoming.target.boxes for incoming in self.plain]
        plain = list(map(Request, map(_number, self.plain), boxes))
        parts = [Request(_number(incoming), [incoming.target.boxes[index]]) for incoming, index in self.parts]
        return plain + parts


def fill_buffers(
    reading: Reading,
    arrays: Iterable[Incoming],
    allocate: Allocate = memory.allocate,
    read: Callable[[Sequence[Request]], list[list[Buffer]]] | None = None,
) -> None:
    """Fills the buffers of all given arrays.

    Args:
        reading: How.
        arrays: The arrays.
        allocate: Gives their memory.
        read: Reads boxes, and something else in the same job.
    """
    with paused_collection():
        plan = _Plan.of(arrays, reading.mappings)
        requests = plan.requests()
    reading.statistics.bytes_needed += plan.mapped_bytes
    if read is not None:
        found = iter(read(requests))
    else:
        found = iter(reading.read(requests, allocate) if requests else [])
    for incoming, buffers in zip(plan.plain, found, strict=False):
        incoming.buffers = buffers
    for (incoming, index), (buffer,) in zip(plan.parts, found, strict=True):
        incoming.buffers[index] = buffer
    if plan.made:
        _allocate_made(reading, plan.made, allocate)
        pieces = (piece for incoming, index in plan.made for piece in _pieces(reading, incoming, index))
        _fill_from_pieces(reading, pieces)


def _number(incoming: Incoming) -> int:
    assert incoming.array is not None, "a scalar is not read"
    return incoming.array


def _map(mappings: Mapped, incoming: Incoming) -> bool:
    """Maps a plain array, if it can be."""
    mapped = mappings.array(Request(_number(incoming), incoming.target.boxes))
    if mapped is not None:
        incoming.buffers = [mapped]
    return mapped is not None


def _is_read(incoming: Incoming, box: Box) -> bool:
    """Whether a box of an array that is not wanted as it is stored can itself be read as it is."""
    if incoming.array is None or incoming.stored.dtype != incoming.target.dtype:
        return False
    return fit.stored_part(incoming.stored, box) == box


def allocate_boxes(wanted: Sequence[tuple[Incoming, int]], allocate: Allocate = memory.allocate) -> None:
    """Gives boxes (by their numbers) of arrays buffers that are still to be filled."""
    known: dict[tuple[int, int, int], memory.Form] = {}  # of boxes that are alike
    forms: list[memory.Form] = []
    for incoming, index in wanted:
        kind = id(incoming.target), id(incoming.stored), index
        form = known.get(kind)
        if form is None:
            shape = incoming.target.boxes[index][1]
            form = known[kind] = memory.form_of_cast(incoming.stored, incoming.target.dtype, shape)
        forms.append(form)
    places, _ = allocate([form.nbytes for form in forms])
    for (incoming, index), form, place in zip(wanted, forms, places, strict=True):
        incoming.buffers[index] = memory.as_array(place, form.shape, form.dtype)


def _allocate_made(reading: Reading, made: Sequence[tuple[Incoming, int]], allocate: Allocate) -> None:
    """Makes the buffers of boxes that are not simply read: scalars and zeros are there at once."""
    allocate_boxes(made, allocate)
    for incoming, index in made:
        buffer = incoming.buffers[index]
        if incoming.value is not None:
            _cast_scalar(reading, incoming, buffer)
        elif fit.stored_part(incoming.stored, incoming.target.boxes[index]) != incoming.target.boxes[index]:
            fit.fill_with_zeros(buffer)


def _cast_scalar(reading: Reading, incoming: Incoming, buffer: Buffer) -> None:
    assert incoming.value is not None
    try:
        casts.copy(buffer, incoming.value, casts.rule_of_loads(reading.options))
    except WaystationError as error:
        raise error.where(leaf=incoming.leaf)


@dataclass(slots=True)
class _Piece:
    """A part of a box that is read in the stored dtype and cast into its place."""

    request: Request
    place: Buffer
    nbytes: int  # with what the cast needs


def _pieces(reading: Reading, incoming: Incoming, index: int) -> Iterator[_Piece]:
    """The pieces that fill what the stored array has of a box."""
    box, buffer = incoming.target.boxes[index], incoming.buffers[index]
    part = None if incoming.array is None else fit.stored_part(incoming.stored, box)
    if part is None or incoming.array is None:
        return
    item_bytes = dtypes.of_name(incoming.stored.dtype).host.itemsize
    for offset, shape in cut(part[1], max(1, reading.cast_bytes // item_bytes)):
        start = tuple(at + begin for at, begin in zip(offset, part[0], strict=True))
        own = slices_of_box(relative_to((start, shape), box[0]))
        nbytes = aligned(math.prod(shape) * item_bytes)
        yield _Piece(Request(incoming.array, [(start, shape)]), buffer[own] if own else buffer, nbytes)


def _fill_from_pieces(reading: Reading, pieces: Iterable[_Piece]) -> None:
    def read(group: list[_Piece]) -> list[list[Buffer]]:
        allocate = Region(reading.cast_bytes).allocate if reading.is_bounded else memory.allocate
        return reading.read([piece.request for piece in group], allocate)

    with contextlib.closing(read_ahead(runs(pieces, reading.cast_bytes), read)) as groups:
        for group, found in groups:
            _cast(reading, group, found)
            del found  # or it would live until the next group is here, and the one after is being read


def _cast(reading: Reading, group: list[_Piece], found: list[list[Buffer]]) -> None:
    rule = casts.rule_of_loads(reading.options)
    for piece, (values,) in zip(group, found, strict=True):
        try:
            casts.copy(piece.place, values, rule)
        except WaystationError as error:
            raise error.where(array=reading.opened.tree.labels[piece.request.array])
