"""What one process writes of each array: chunks, and the memory that they are gathered from.

A process that holds every element of an array writes it as one chunk. Of an array that is spread over
processes it writes its share, or all that it holds where it has a storage of its own. Chunks are cut
further where `chunk_bytes` asks for it.

Invariants: all is in storage terms, where an array may have a trailing axis of bytes, which is never cut;
the blocks of a chunk partition it, their offsets counted from its own; no array byte is read here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from waystation import grid
from waystation._distinct import distinct_objects
from waystation._errors import InvalidInput, WaystationError
from waystation._options import ArraySavingOptions, StorageOptions
from waystation.frameworks.base import ArraySource, Block

MIN_SLICE_BYTES = 1 << 20
CHUNK_BYTES = 32 << 20  # where axes are named and no size
_NOTHING = StorageOptions()


@dataclass(slots=True)
class Chunk:
    """A box of an array that becomes one tensor of a data file.

    Attributes:
        array: Number of the array.
        offset: Where the box begins in the array, None if the chunk is the whole array.
        shape: Of the box.
        nbytes: Of the box.
        blocks: The memory that it is gathered from.
    """

    array: int
    offset: tuple[int, ...] | None
    shape: tuple[int, ...]
    nbytes: int
    blocks: list[Block]


class Chunks(Sequence[Chunk]):
    """Chunks in columns, as most of them are whole arrays that lie in host memory in one piece.

    Attributes:
        arrays: The number of the array of each.
        lengths: Its bytes.
        addresses: Where its bytes are.
        owners: What keeps them alive.
        others: By their places, the chunks that are anything else. These are changed in place.
    """

    __slots__ = ("_sources", "addresses", "arrays", "lengths", "others", "owners")

    arrays: NDArray[np.int64]
    lengths: NDArray[np.int64]
    addresses: NDArray[np.int64]
    owners: list[object]

    def __init__(
        self,
        sources: Sequence[ArraySource],
        arrays: NDArray[np.int64],
        lengths: NDArray[np.int64],
        addresses: NDArray[np.int64],
        owners: list[object],
        others: dict[int, Chunk],
    ) -> None:
        self._sources = sources
        self.arrays, self.lengths = arrays, lengths
        self.addresses, self.owners = addresses, owners
        self.others: dict[int, Chunk] = others

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Chunks:
        """Columns of any chunks."""
        if isinstance(chunks, Chunks):
            return chunks
        arrays = np.array([chunk.array for chunk in chunks], np.int64)
        lengths = np.array([chunk.nbytes for chunk in chunks], np.int64)
        nowhere: list[object] = [None] * len(chunks)
        return cls((), arrays, lengths, np.zeros(len(chunks), np.int64), nowhere, dict(enumerate(chunks)))

    def __len__(self) -> int:
        return len(self.arrays)

    @overload
    def __getitem__(self, place: int) -> Chunk: ...

    @overload
    def __getitem__(self, place: slice) -> list[Chunk]: ...

    def __getitem__(self, place: int | slice) -> Chunk | list[Chunk]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        other = self.others.get(place)
        if other is not None:
            return other
        array = int(self.arrays[place])  # raises IndexError at the end
        source = self._sources[array]
        block = block_of(source, int(self.addresses[place]), self.owners[place])
        return Chunk(array, None, source.storage_shape, int(self.lengths[place]), [block])

    def expand(self) -> None:
        """Makes all of them such as can be changed in place."""
        self.others = dict(enumerate(self))
        self.owners = [None] * len(self)

    def are_whole(self) -> NDArray[np.bool_]:
        """Which of them are whole arrays."""
        found = np.ones(len(self), bool)
        found[[place for place, chunk in self.others.items() if chunk.offset is not None]] = False
        return found


def block_of(source: ArraySource, address: int, owner: object) -> Block:
    """The memory of an array that lies in host memory in one piece."""
    shape = source.storage_shape
    strides = grid.contiguous_strides(shape, source.storage_item_bytes)
    return Block((0,) * len(shape), shape, strides, address, owner)


@dataclass(frozen=True, slots=True)
class Writer:
    """Which process of how many writes, and what.

    Attributes:
        process: The process.
        process_count: How many there are.
        primary: The one that writes what all have a value of their own of.
        is_local: Whether each process writes all that it holds, to a storage of its own.
    """

    process: int = 0
    process_count: int = 1
    primary: int = 0
    is_local: bool = False


ALONE = Writer()


def cut(
    sources: Sequence[ArraySource],
    labels: Sequence[str],
    saving: ArraySavingOptions,
    writer: Writer = ALONE,
    element_bytes: Mapping[int, int] | None = None,
    addresses: Sequence[int] | NDArray[np.int64] = (),
    owners: Sequence[object] | None = None,
) -> Chunks:
    """The chunks that a process writes, by array.

    Args:
        sources: All arrays. Those that lie in host memory in one piece share one for each kind, and are cut
            alike.
        labels: Their key paths.
        saving: How they are to be cut.
        writer: The process.
        element_bytes: Of the arrays that will be cast: bytes of an element then.
        addresses: Where those begin that lie in one piece.
        owners: What keeps their memory alive; None for the others, which have blocks.

    Raises:
        InvalidInput: The options of an array do not fit it.
    """
    cutter = _Cutter(saving, writer, element_bytes or {})
    arrays: list[int] = []
    others: dict[int, Chunk] = {}
    if owners is None:
        addresses, owners = [0] * len(sources), [None] * len(sources)
    for number, (source, label, owner) in enumerate(zip(sources, labels, owners, strict=True)):
        try:
            boxes = cutter.boxes(number, source, label, in_one_piece=owner is not None)
        except WaystationError as error:
            raise error.where(array=label)
        for box in boxes:
            if owner is None:
                others[len(arrays)] = chunk_of(number, source, box, source.blocks)
            elif box[1] != source.shape:
                block = block_of(source, int(addresses[number]), owner)
                others[len(arrays)] = chunk_of(number, source, box, [block])
            arrays.append(number)
    chosen = np.array(arrays, np.int64)
    kinds, which = distinct_objects(sources)
    lengths = np.array([nbytes_of(kind) for kind in kinds], np.int64)[which[chosen]]
    lengths[list(others)] = [chunk.nbytes for chunk in others.values()]
    begins = np.asarray(addresses, np.int64)[chosen]
    keepers = [None if place in others else owners[number] for place, number in enumerate(arrays)]
    return Chunks(sources, chosen, lengths, begins, keepers, others)


def are_whole(saving: ArraySavingOptions, writer: Writer) -> bool:
    """Whether the process writes every array as one chunk."""
    is_plain = saving.storage_options_for is None and _chunk_bytes(saving.storage_options) is None
    return is_plain and writer.process_count == 1


def whole_chunks(
    sources: Sequence[ArraySource], addresses: NDArray[np.int64], owners: Sequence[object]
) -> Chunks:
    """The chunks of such a process.

    Args:
        sources: All arrays.
        addresses: Where those begin that lie in host memory in one piece.
        owners: What keeps their memory alive; None for the others, which have blocks.
    """
    kinds, which = distinct_objects(sources)
    lengths = np.array([nbytes_of(kind) for kind in kinds], np.int64)[which]
    others = {
        number: Chunk(number, None, source.storage_shape, nbytes_of(source), source.blocks)
        for number, (source, owner) in enumerate(zip(sources, owners, strict=True))
        if owner is None
    }
    return Chunks(sources, np.arange(len(sources)), lengths, addresses.copy(), list(owners), others)


def nbytes_of(source: ArraySource) -> int:
    """Bytes of a whole array in storage."""
    return math.prod(source.storage_shape) * source.storage_item_bytes


def storage_options(saving: ArraySavingOptions, label: str, source: ArraySource) -> StorageOptions:
    """The options of one array: what the caller's function says, and where that says nothing, of all."""
    every, own = saving.storage_options, options_by_name(saving, label, source)
    if own is _NOTHING:
        return every
    return StorageOptions(
        dtype=every.dtype if own.dtype is None else own.dtype,
        chunk_bytes=every.chunk_bytes if own.chunk_bytes is None else own.chunk_bytes,
        chunk_axes=every.chunk_axes if own.chunk_axes is None else own.chunk_axes,
    )


def options_by_name(saving: ArraySavingOptions, label: str, source: ArraySource) -> StorageOptions:
    """What the caller's function says of one array.

    Raises:
        InvalidInput: It returned something else than options.
    """
    chosen = None if saving.storage_options_for is None else saving.storage_options_for(label, source)
    if chosen is None:
        return _NOTHING
    if not isinstance(chosen, StorageOptions):
        raise InvalidInput(f"storage_options_for must return StorageOptions or None, not {chosen!r}")
    return chosen


def _chunk_bytes(storage: StorageOptions) -> int | None:
    if storage.chunk_bytes is None and storage.chunk_axes is not None:
        return CHUNK_BYTES
    return storage.chunk_bytes


def _sharing(saving: ArraySavingOptions, writer: Writer) -> grid.Sharing:
    smallest = saving.min_slice_bytes_for_replica_parallel or MIN_SLICE_BYTES
    most = saving.max_replicas_for_replica_parallel or writer.process_count
    return grid.Sharing(writer.process, smallest, 1 if saving.use_replica_parallel is False else most)


class _Cutter:
    """Says which boxes of array after array a process writes; of equal arrays once, where it can."""

    def __init__(self, saving: ArraySavingOptions, writer: Writer, element_bytes: Mapping[int, int]) -> None:
        self._saving, self._writer = saving, writer
        self._element_bytes = element_bytes
        self._sharing = _sharing(saving, writer)
        # By the identity of the sources, which outlive this: what is said of them, if of each the same.
        self._known: dict[int, list[grid.Box]] = {}
        self._is_alike = saving.storage_options_for is None and not element_bytes

    def boxes(self, number: int, source: ArraySource, label: str, *, in_one_piece: bool) -> list[grid.Box]:
        """The boxes of the next array that the process writes, in logical elements."""
        known = self._known.get(id(source))
        if known is not None:
            return known
        found = self._boxes(number, source, label, in_one_piece)
        # What processes share is given to whoever has the least so far.
        if self._is_alike and (source.spread is None or self._writer.process_count == 1):
            self._known[id(source)] = found
        return found

    def _boxes(self, number: int, source: ArraySource, label: str, in_one_piece: bool) -> list[grid.Box]:
        storage = storage_options(self._saving, label, source)
        element_bytes = self._element_bytes.get(number) or _element_bytes(source)
        writer, whole, chunk_bytes = self._writer, grid.whole(source.shape), _chunk_bytes(storage)
        spread = source.spread if writer.process_count > 1 and grid.volume(whole) else None
        if spread is None and writer.process != writer.primary and not writer.is_local:
            return []
        boxes = [whole]
        if spread is not None and not writer.is_local:
            boxes = self._sharing.share(spread, element_bytes)
        elif not in_one_piece and (spread is not None or (chunk_bytes is not None and grid.volume(whole))):
            boxes = list(dict.fromkeys(_logical_box(block, source) for block in source.blocks))
        if chunk_bytes is None:
            return _joined(boxes)
        axes, shape = storage.chunk_axes, source.shape
        return [part for box in boxes for part in _subchunks(box, shape, element_bytes, chunk_bytes, axes)]


def _element_bytes(source: ArraySource) -> int:
    return source.storage_item_bytes * math.prod(source.storage_shape[len(source.shape) :])


def _logical_box(block: Block, source: ArraySource) -> grid.Box:
    rank = len(source.shape)
    return block.offset[:rank], block.shape[:rank]


def _joined(boxes: list[grid.Box]) -> list[grid.Box]:
    """Boxes that fill a larger one become that one: what the devices of a process hold, mostly."""
    if len(boxes) < 2:
        return boxes
    made = np.array(boxes, np.int64)
    begin, end = made[:, 0].min(axis=0), (made[:, 0] + made[:, 1]).max(axis=0)
    if math.prod((end - begin).tolist()) != sum(map(grid.volume, boxes)):
        return boxes
    return [(tuple(begin.tolist()), tuple((end - begin).tolist()))]


def _subchunks(
    box: grid.Box,
    array_shape: tuple[int, ...],
    element_bytes: int,
    chunk_bytes: int,
    axes: tuple[int, ...] | None,
) -> list[grid.Box]:
    sharded = [axis for axis, extent in enumerate(array_shape) if box[1][axis] != extent]
    shape = grid.choose_chunk_shape(box[1], element_bytes, chunk_bytes, axes, sharded)
    parts = grid.ChunkGrid(box[1], shape).boxes()
    parts[:, 0] += np.array(box[0], np.int64)
    return [grid.box_at(parts, position) for position in range(len(parts))]


def chunk_of(number: int, source: ArraySource, box: grid.Box, memory: list[Block]) -> Chunk:
    """A box of an array, in logical elements, with what it has of the memory of that array."""
    rank = len(source.shape)
    trailing = source.storage_shape[rank:]
    offset, shape = box[0] + (0,) * len(trailing), box[1] + trailing
    nbytes = math.prod(shape) * source.storage_item_bytes
    if shape == source.storage_shape:
        return Chunk(number, None, shape, nbytes, memory)
    blocks = [clipped for block in memory if (clipped := _clipped(block, (offset, shape))) is not None]
    return Chunk(number, offset, shape, nbytes, blocks)


def _clipped(block: Block, box: grid.Box) -> Block | None:
    """The part of a block that lies in a box, counted from the box."""
    common = grid.intersect((block.offset, block.shape), box)
    if common is None:
        return None
    skipped = [begin - own for begin, own in zip(common[0], block.offset, strict=True)]
    address = block.address + sum(
        count * stride for count, stride in zip(skipped, block.strides, strict=True)
    )
    offset = tuple(begin - own for begin, own in zip(common[0], box[0], strict=True))
    return Block(offset, common[1], block.strides, address, block.owner, block.device)


def is_contiguous(block: Block, item_bytes: int) -> bool:
    """Whether a block's elements lie one after another, in C order."""
    return _is_contiguous(block.shape, block.strides, item_bytes)


# States have few shapes and many arrays.
@functools.lru_cache(maxsize=4096)
def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    expected = item_bytes
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
