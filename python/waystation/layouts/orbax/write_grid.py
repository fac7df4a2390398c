"""How arrays are cut for zarr, and which process writes which chunks.

Zarr knows one kind of cutting: a regular grid, from the first element on. So chunks follow the shards, which
are such a grid nearly always, and are divided further: among the processes that hold the same shard, by the
caller's `chunk_bytes`, and where they would be too large to be read in parallel. What shards of uneven sizes
have in common is the grid of their greatest common divisors.

Invariants: every process comes to the same grid by itself, and to a partition of its chunks: each is
written by one process, from a box that it holds; a chunk lies inside of one box. All is in logical elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from waystation import grid
from waystation._errors import Unsupported
from waystation._options import StorageOptions
from waystation.frameworks.base import ArraySource
from waystation.layouts.native.chunks import CHUNK_BYTES, Writer

# Readers of this format read whole chunks, several at a time.
PLAIN_CHUNK_BYTES = 64 << 20
COMPRESSED_CHUNK_BYTES = 16 << 20
# Shards below this are not worth a chunk each, if one process has them all.
LEAST_CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Cut:
    """An array cut into chunks.

    Attributes:
        grid: All of them.
        own: The numbers of those that this process writes, ascending.
        is_alone: Whether one process writes all of them.
    """

    grid: grid.ChunkGrid
    own: list[int]
    is_alone: bool


@dataclass(slots=True)
class Cutter:
    """Cuts array after array of a state.

    Attributes:
        writer: The process.
        min_slice_bytes: A box that several processes hold is divided among them into no less than that.
        most_slices: Nor into more than so many.
        chunk_bytes: Chunks are no larger than that where the caller does not say how large.
    """

    writer: Writer
    min_slice_bytes: int
    most_slices: int
    chunk_bytes: int
    # Bytes given so far to the members of each group of holders.
    _given: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict)

    def cut(self, source: ArraySource, element_bytes: int, storage: StorageOptions) -> Cut:
        """Cuts the next array, whose elements have so many bytes.

        Raises:
            InvalidInput: The storage options do not fit it.
            Unsupported: Its shards make no grid that a checkpoint could have.
        """
        spread = source.spread if self.writer.process_count > 1 and all(source.shape) else None
        if spread is not None:
            return self._cut_shared(spread, element_bytes, storage)
        chunks = self._grid(
            source.shape, self._shard_of(source, element_bytes, storage), element_bytes, storage
        )
        is_own = self.writer.process == self.writer.primary
        return Cut(chunks, list(range(chunks.chunk_count)) if is_own else [], is_alone=True)

    def _shard_of(self, source: ArraySource, element_bytes: int, storage: StorageOptions) -> grid.Shape:
        """The shape of the shards of an array that this process holds whole, if they are worth a chunk, or
        are to be divided as the caller says."""
        rank = len(source.shape)
        boxes = [(block.offset[:rank], block.shape[:rank]) for block in source.blocks]
        found = grid.find_grid(source.shape, boxes) if len(boxes) > 1 else None
        if found is None:
            return source.shape
        shard = found[0].chunk_shape
        is_asked_for = storage.chunk_bytes is not None or storage.chunk_axes is not None
        is_small = math.prod(shard) * element_bytes < LEAST_CHUNK_BYTES and not is_asked_for
        return source.shape if is_small or not _divides(shard, source.shape) else shard

    def _cut_shared(self, spread: grid.Spread, element_bytes: int, storage: StorageOptions) -> Cut:
        shape = spread.array_shape
        found = grid.find_grid(shape, spread.boxes)
        shard = _common_divisors(spread) if found is None else found[0].chunk_shape
        is_even = found is not None and _divides(shard, shape)
        axis, pieces = self._slices(shard, element_bytes, spread) if is_even else (0, 1)
        part = tuple(extent // pieces if at == axis else extent for at, extent in enumerate(shard))
        chunks = self._grid(shape, part, element_bytes, storage)
        own = [
            number
            for box, holders in zip(spread.boxes, spread.holders, strict=True)
            if self.writer.process in holders
            for mine in self._share(box, holders, axis, pieces, element_bytes)
            for number, _ in chunks.meeting(mine)
        ]
        return Cut(chunks, sorted(own), is_alone=False)

    def _slices(self, shard: grid.Shape, element_bytes: int, spread: grid.Spread) -> tuple[int, int]:
        """Along which axis a shard is divided among its holders, and into how many equal slices."""
        axis = next((axis for axis, extent in enumerate(shard) if extent > 1), None)
        if axis is None:
            return 0, 1
        affordable = math.prod(shard) * element_bytes // self.min_slice_bytes
        wanted = min(*map(len, spread.holders), self.most_slices, affordable)
        return axis, next((pieces for pieces in range(wanted, 1, -1) if shard[axis] % pieces == 0), 1)

    def _share(
        self, box: grid.Box, holders: tuple[int, ...], axis: int, pieces: int, element_bytes: int
    ) -> list[grid.Box]:
        """The part of a box that this process, one of its holders, writes: a slice, all or nothing."""
        given = self._given.setdefault(holders, np.zeros(len(holders), np.int64))
        # Those that have been given least, in their own order.
        members = np.sort(given.argsort(kind="stable")[:pieces])
        given[members] += grid.volume(box) * element_bytes // pieces
        place = np.flatnonzero(members == holders.index(self.writer.process))
        if not place.size:
            return []
        if pieces == 1:
            return [box]
        step = box[1][axis] // pieces
        offset, shape = list(box[0]), list(box[1])
        offset[axis] += int(place[0]) * step
        shape[axis] = step
        return [(tuple(offset), tuple(shape))]

    def _grid(
        self, shape: grid.Shape, part: grid.Shape, element_bytes: int, storage: StorageOptions
    ) -> grid.ChunkGrid:
        """The grid of chunks that divide a part of an array as the options say."""
        wanted, axes = storage.chunk_bytes, storage.chunk_axes
        if wanted is None and axes is None:
            chunk = _slabs(part, element_bytes, self.chunk_bytes)
        else:
            sharded = [axis for axis, extent in enumerate(shape) if part[axis] != extent]
            chunk = grid.choose_chunk_shape(
                part, element_bytes, wanted or min(CHUNK_BYTES, self.chunk_bytes), axes, sharded
            )
        chunks = grid.ChunkGrid(shape, chunk)
        if chunks.chunk_count > _MOST_CHUNKS:
            raise Unsupported(
                f"an array of shape {shape} would become {chunks.chunk_count} chunks of shape {chunk}, as "
                "Orbax's layouts cut arrays into equal chunks only; use shards of even sizes or larger "
                "chunk_bytes, or save it in Waystation's own layout (array.saving.use_ocdbt = None)"
            )
        return chunks


def _divides(shape: grid.Shape, array_shape: grid.Shape) -> bool:
    return all(extent % step == 0 for extent, step in zip(array_shape, shape, strict=True))


def _slabs(shape: grid.Shape, element_bytes: int, most_bytes: int) -> grid.Shape:
    """Divides along the first axes only, so that chunks are contiguous where the array is."""
    chunk = tuple(max(1, extent) for extent in shape)
    for axis in range(len(chunk)):
        if math.prod(chunk) * element_bytes <= most_bytes:
            break
        chunk = grid.choose_chunk_shape(chunk, element_bytes, most_bytes, (axis,))
    return chunk


def _common_divisors(spread: grid.Spread) -> grid.Shape:
    """The largest chunks of which every box is made, whatever its size."""
    found = []
    for axis, extent in enumerate(spread.array_shape):
        begins = {box[0][axis] for box in spread.boxes}
        ends = {box[0][axis] + box[1][axis] for box in spread.boxes} - {extent}
        found.append(math.gcd(*begins, *ends) or extent)
    return tuple(found)
