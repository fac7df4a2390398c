"""What boxes of arrays take of which stored chunks, and where these are.

First the chunks of all boxes are found by arithmetic, then all that have to be looked at are looked at
together: where their values are, then their indices in one engine job. Invariants: every place that is
returned lies inside of its file and has the length of its chunk, if it is not compressed; nothing is
allocated for what a file merely claims to have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from waystation import _native, _plans, grid
from waystation._collection import paused_collection
from waystation._errors import Corrupt, WaystationError
from waystation.grid import Box, ChunkGrid
from waystation.layouts.orbax import shard_index
from waystation.layouts.orbax.values import Files, Value, Values
from waystation.layouts.orbax.zarr import ZarrArray

Shape = tuple[int, ...]
Place = tuple[int, Shape]  # the number of an array, and the place of a chunk in its grid
Integers = NDArray[np.int64]

# Compressed, a byte stands for no more.
_MOST_BYTES_PER_BYTE = 32 << 10
_MOST_NAMED = 3  # arrays in an error

# Reads what records of `_native.start_read` ask for, to memory that the last argument keeps alive.
ReadRecords = Callable[[Files, Integers, object], None]


class StoredChunk(NamedTuple):
    """What of an array can be read alone, and where it is."""

    value: Value  # of which it is a part
    offset: int  # in the file, or in the content of the value
    nbytes: int  # as it is stored, with its checksum


class Part(NamedTuple):
    """What a box takes of a chunk."""

    chunk: StoredChunk | None  # None: the chunk is not there
    in_chunk: Shape  # where it begins, counted from the chunk
    in_box: Shape  # and counted from the box
    shape: Shape


class NamedArray(NamedTuple):
    """An array and the name under which it is stored."""

    name: str
    zarr: ZarrArray

    def key(self, place: Shape) -> str:
        """The key of a chunk."""
        own = self.zarr.chunk_key(place)
        return f"{self.name}/{own}" if self.name else own


class PartRead(NamedTuple):
    """A part of a box, and where it comes from and goes to."""

    array: NamedArray
    part: Part
    buffer: np.ndarray[Any, Any]  # of the whole box

    def place(self) -> tuple[int, tuple[int, ...]]:
        """The address of the part in its box, and the strides there."""
        address, strides = self.buffer.__array_interface__["data"][0], self.buffer.strides
        return address + sum(at * step for at, step in zip(self.part.in_box, strides, strict=True)), strides

    def planned(self) -> tuple[int, ...]:
        """What plans say of it."""
        zarr, part = self.array.zarr, self.part
        return _plans.part(zarr.item_bytes, zarr.read_shape, part.in_chunk, part.shape, *self.place())


class ChunkPlaces:
    """The chunks of the arrays of a checkpointable.

    Args:
        arrays: By number.
        values: Where their chunks are.
        absent_is_damage: Whether a chunk that is not there is missing, or stands for the fill value.
    """

    def __init__(self, arrays: Sequence[NamedArray], values: Values, *, absent_is_damage: bool) -> None:
        self._arrays = arrays
        self._values = values
        self._absent_is_damage = absent_is_damage
        self._known: dict[Place, Value | None] = {}
        self._indices: dict[Place, Integers] = {}

    @paused_collection()
    def locate(self, boxes: Sequence[tuple[int, Box]], read: ReadRecords) -> list[list[Part]]:
        """What each box, of the array of this number, is made of.

        Raises:
            Corrupt: Something that it needs is missing or damaged.
        """
        outer = [list(self._outer_chunks(array, box)) for array, box in boxes]
        self._look_at({place: None for own in outer for place, _ in own}, read)
        return [
            [part for place, origin in own for part in self._parts(place, origin, box)]
            for own, (_, box) in zip(outer, boxes, strict=True)
        ]

    def extents(self) -> list[tuple[int, Value]]:
        """Where the chunks of all arrays are that are there, with the number of their array."""
        places = [
            place
            for array, (_, zarr) in enumerate(self._arrays)
            for place, _ in self._outer_chunks(array, ((0,) * len(zarr.shape), zarr.shape))
        ]
        values = self._values.find([self._key(place) for place in places])
        return [(place[0], value) for place, value in zip(places, values, strict=True) if value is not None]

    def _outer_chunks(self, array: int, box: Box) -> Iterator[tuple[Place, Shape]]:
        """The chunks that meet a box, with where they begin."""
        zarr = self._arrays[array].zarr
        for _, (origin, _) in ChunkGrid(zarr.shape, zarr.chunk_shape).meeting(box):
            place = tuple([begin // step for begin, step in zip(origin, zarr.chunk_shape, strict=True)])
            yield (array, place), origin

    # ---- looking at files ----------------------------------------------------------------------

    def _look_at(self, places: dict[Place, None], read: ReadRecords) -> None:
        """Finds out where chunks are that are not known yet."""
        unknown = [place for place in places if place not in self._known]
        found = self._values.find([self._key(place) for place in unknown])
        sharded: list[tuple[Place, Value]] = []
        for place, value in zip(unknown, found, strict=True):
            zarr = self._arrays[place[0]].zarr
            if value is None:
                self._check_absent(place)
            elif zarr.inner_chunk_shape is not None:
                sharded.append((place, value))
            else:
                self._check_length(place, value.nbytes)
        self._read_indices(sharded, read)
        self._known.update(zip(unknown, found, strict=True))

    def _key(self, place: Place) -> str:
        return self._arrays[place[0]].key(place[1])

    def _read_indices(self, sharded: Sequence[tuple[Place, Value]], read: ReadRecords) -> None:
        in_files: list[tuple[Place, Value]] = []
        extents: list[tuple[int, int, int]] = []
        files = Files()
        for place, value in sharded:
            zarr = self._arrays[place[0]].zarr
            nbytes = shard_index.index_bytes(zarr)
            if nbytes > value.nbytes:
                raise self._corrupt(place, f"has {value.nbytes} bytes, less than its index")
            begin = value.nbytes - nbytes if zarr.index.is_at_end else 0
            if value.content is not None:
                self._keep_index(place, value, value.content[begin : begin + nbytes])
            else:
                in_files.append((place, value))
                extents.append((files.number(value), value.offset + begin, nbytes))
        if not in_files:
            return
        numbers, offsets, lengths = np.array(extents, np.int64).T
        slab = _native.allocate(int(lengths.sum()))
        begins = np.cumsum(lengths) - lengths
        read(files, _plans.byte_reads(numbers, offsets, lengths, slab.address + begins), slab)
        content = memoryview(slab)
        for (place, value), begin, nbytes in zip(in_files, begins.tolist(), lengths.tolist(), strict=True):
            self._keep_index(place, value, content[begin : begin + nbytes].tobytes())

    def _keep_index(self, place: Place, value: Value, data: bytes) -> None:
        zarr, path = self._arrays[place[0]].zarr, self._values.where(self._key(place))
        try:
            self._indices[place] = shard_index.decode(data, zarr, value.nbytes, path)
        except Corrupt as error:
            raise error.where(array=self._arrays[place[0]].name)

    # ---- parts of chunks -----------------------------------------------------------------------

    def _parts(self, place: Place, origin: Shape, box: Box) -> Iterator[Part]:
        """What a box takes of a chunk, or of its inner chunks."""
        zarr, value = self._arrays[place[0]].zarr, self._known[place]
        common = grid.intersect((origin, zarr.chunk_shape), box)
        assert common is not None, "the chunk was found because it meets the box"
        if value is None or zarr.inner_chunk_shape is None:
            chunk = None if value is None else StoredChunk(value, value.offset, value.nbytes)
            yield _part(chunk, origin, box, common)
            return
        index = self._indices[place]
        inner = ChunkGrid(zarr.chunk_shape, zarr.inner_chunk_shape)
        for number, (begin, extents) in inner.meeting(grid.relative_to(common, origin)):
            at = tuple([start + step for start, step in zip(origin, begin, strict=True)])
            own = grid.intersect((at, extents), common)
            assert own is not None, "the inner chunk was found because it meets the box"
            yield _part(self._inner_chunk(place, value, index[number].tolist()), at, box, own)

    def _inner_chunk(self, place: Place, value: Value, entry: Sequence[int]) -> StoredChunk | None:
        offset, nbytes = entry
        if offset < 0:
            self._check_absent(place)
            return None
        self._check_length(place, nbytes)
        return StoredChunk(value, value.offset + offset, nbytes)

    # ---- refusals ------------------------------------------------------------------------------

    def _check_absent(self, place: Place) -> None:
        if self._absent_is_damage:
            raise self._corrupt(place, "is missing, in whole or in part")

    def _check_length(self, place: Place, nbytes: int) -> None:
        zarr = self._arrays[place[0]].zarr
        expected = math.prod(zarr.read_shape) * zarr.item_bytes
        stored = nbytes - zarr.checksum_bytes
        is_right = stored == expected if zarr.is_direct else 0 < stored >= expected // _MOST_BYTES_PER_BYTE
        if not is_right:
            raise self._corrupt(place, f"holds a chunk of {stored} bytes where {expected} were written")

    def _corrupt(self, place: Place, problem: str) -> Corrupt:
        path = self._values.where(self._key(place))
        return Corrupt(
            f"'{path}' {problem}; restore another checkpoint", path=path, array=self._arrays[place[0]].name
        )


def _part(chunk: StoredChunk | None, origin: Shape, box: Box, common: Box) -> Part:
    begin, shape = common
    in_chunk = tuple([at - start for at, start in zip(begin, origin, strict=True)])
    in_box = tuple([at - start for at, start in zip(begin, box[0], strict=True)])
    return Part(chunk, in_chunk, in_box, shape)


def name_array(error: WaystationError, reads: Sequence[PartRead]) -> None:
    """Adds to an error which arrays it is of, as far as its path and range tell."""
    path, offset = error.context.get("path"), error.context.get("offset")
    begin, end = 0, 1 << 63
    if offset is not None:
        begin = int(offset)
        end = begin + int(error.context.get("length", 1))
    found = {read.array.name: None for read in reads if _has_bytes(read.part.chunk, path, begin, end)}
    labels = list(found)
    if labels:
        more = f" and {len(labels) - _MOST_NAMED} more" if len(labels) > _MOST_NAMED else ""
        error.where(array=", ".join(labels[:_MOST_NAMED]) + more)


def _has_bytes(chunk: StoredChunk | None, path: object, begin: int, end: int) -> bool:
    """Whether a chunk has bytes in a range of a file."""
    if chunk is None or chunk.value.path != path:
        return False
    return chunk.offset < end and chunk.offset + chunk.nbytes > begin
