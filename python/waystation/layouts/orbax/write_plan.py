"""Where every byte of a save in one of Orbax's layouts goes, as far as that is known before it is written.

Each array is a zarr array. In OCDBT its chunks are values that stand one after another in few data files.
In plain files each chunk is one, but for an array of several chunks that one process writes as they are: that
is one file of inner chunks with their index at the end, all places in which are known in advance.

Pure planning: no file is touched and no array byte is read. Invariants: no two processes write to one file;
large chunks begin at pages of their files, so that they are written past the page cache, and can be mapped;
chunks at the edge of an array are stored in full, filled up with zeros.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation import _plans, grid
from waystation._errors import InvalidInput
from waystation._options import ArraySavingOptions
from waystation.frameworks import dtypes
from waystation.frameworks.base import ArraySource, Block
from waystation.layouts.native import write_plan
from waystation.layouts.native.chunks import MIN_SLICE_BYTES, Chunk, Writer, chunk_of, storage_options
from waystation.layouts.native.write_plan import PlannedFile
from waystation.layouts.orbax import names, shard_index, write_ocdbt
from waystation.layouts.orbax.frame_limits import FrameLimits
from waystation.layouts.orbax.write_grid import PLAIN_CHUNK_BYTES, Cut, Cutter
from waystation.layouts.orbax.zarr import CHECKSUM, Codec, ZarrArray

_PAGE_BYTES = 4096
_LINE_BYTES = 64
_PAGED_BYTES = 16 * _PAGE_BYTES  # beginning at a page would cost smaller chunks too much padding
_FILE_BYTES = 2 << 30
_CHUNK_FILE = re.compile(r"(c\.)?\d+(\.\d+)*")
_LEVELS = {True: 3, False: 1}  # what Orbax takes for zarr 3, and for 2


@dataclass(frozen=True, slots=True)
class Storage:
    """How arrays are stored.

    Attributes:
        use_ocdbt: Whether chunks are values in data files, else files.
        use_zarr3: Whether as zarr of version 3, else 2.
        has_checksums: Whether the CRC-32C of each chunk follows it.
        level: Of zstd; None where chunks are not compressed.
        file_bytes: Data files are rolled over near this size.
    """

    use_ocdbt: bool
    use_zarr3: bool
    has_checksums: bool
    level: int | None
    file_bytes: int

    @classmethod
    def of(cls, saving: ArraySavingOptions) -> Storage:
        """What the options say."""
        wanted = saving.ocdbt_target_data_file_size
        return cls(
            saving.use_ocdbt is True,
            saving.use_zarr3,
            saving.use_zarr3 and saving.use_crc32c,
            _LEVELS[saving.use_zarr3] if saving.use_compression else None,
            _FILE_BYTES if wanted is None else wanted or 1 << 62,
        )

    def chunk_bytes(self, limits: FrameLimits) -> int:
        """The largest chunk where the caller does not say how large."""
        most = PLAIN_CHUNK_BYTES if self.level is None else limits.chunk_bytes
        return min(most, self.file_bytes) if self.use_ocdbt else most

    @property
    def metadata_file(self) -> str:
        """The name of the file, or key, with the metadata of an array."""
        return names.ZARR3 if self.use_zarr3 else names.ZARR2


@dataclass(slots=True)
class Value:
    """A chunk of an array that this process writes.

    Attributes:
        number: In the grid of its array.
        chunk: Its memory, filled up to the size of every chunk.
    """

    number: int
    chunk: Chunk


@dataclass(slots=True)
class Arrays:
    """The arrays of a state, cut into chunks.

    Attributes:
        names: Under which they are stored.
        sources: What they are.
        cuts: How they are cut.
        values: What this process writes.
        storage: How they are stored.
        zeros: What fills up chunks and files.
        zarr: Their metadata; known once arrays have been cast, see `describe`.
    """

    names: Sequence[str]
    sources: Sequence[ArraySource]
    cuts: list[Cut]
    values: list[Value]
    storage: Storage
    zeros: NDArray[np.uint8]
    zarr: list[ZarrArray] = field(default_factory=list)

    def describe(self) -> None:
        """Makes the metadata, of arrays that are in their final dtypes."""
        self.zarr = [self._zarr(number) for number in range(len(self.cuts))]

    def _zarr(self, number: int) -> ZarrArray:
        source, storage, chunks = self.sources[number], self.storage, self.cuts[number].grid
        is_key = dtypes.is_key(source.dtype)
        words = source.storage_shape[len(source.shape) :] if is_key else ()
        shape, chunk_shape = source.shape + words, chunks.chunk_shape + words
        is_one_file = self._is_one_file(self.cuts[number])
        codecs = [] if storage.level is None else [Codec("zstd", {"level": storage.level})]
        codecs += [CHECKSUM] if storage.has_checksums else []
        return ZarrArray(
            3 if storage.use_zarr3 else 2,
            shape,
            "uint32" if is_key else source.dtype,
            shape if is_one_file else chunk_shape,
            chunk_shape if is_one_file else None,
            tuple(codecs),
            # Without directories for the chunks of an array a save of many arrays makes a third as many.
            separator="/" if storage.use_ocdbt and storage.use_zarr3 else ".",
            has_prefix=storage.use_zarr3,
        )

    def _is_one_file(self, found: Cut) -> bool:
        storage = self.storage
        is_plain = not storage.use_ocdbt and storage.use_zarr3 and storage.level is None
        return is_plain and found.is_alone and found.grid.chunk_count > 1

    def is_inner(self, number: int) -> bool:
        """Whether the chunks of an array are inner chunks of one file."""
        return self.zarr[number].inner_chunk_shape is not None

    def key(self, array: int, number: int) -> str:
        """The key, or the path of the file, of a chunk."""
        zarr, chunks = self.zarr[array], self.cuts[array].grid
        place = [int(at) for at in np.unravel_index(number, chunks.counts)] if chunks.counts else []
        if self.is_inner(array):
            place = [0] * len(place)
        words = [0] * (len(zarr.shape) - len(place))
        return joined(self.names[array], zarr.chunk_key([*place, *words]))

    def metadata(self) -> dict[str, bytes]:
        """The metadata of the arrays, by key or path."""
        file = self.storage.metadata_file
        return {joined(name, file): zarr.encode() for name, zarr in zip(self.names, self.zarr, strict=True)}

    def is_file_of_array(self, name: str) -> bool:
        """Whether a file in the directory of an array may have this name."""
        return name == self.storage.metadata_file or name == "c" or _CHUNK_FILE.fullmatch(name) is not None

    def directories(self) -> list[str]:
        """The directories that plain files need, parents first."""
        if self.storage.use_ocdbt:
            return []
        found: set[str] = set()
        for name in filter(None, self.names):
            parts = name.split("/")
            found.update("/".join(parts[: end + 1]) for end in range(len(parts)))
        return sorted(found)


def joined(name: str, key: str) -> str:
    """A path from the directory of the checkpointable, of what belongs to an array."""
    return f"{name}/{key}" if name else key


def cut(
    array_names: Sequence[str],
    sources: Sequence[ArraySource],
    saving: ArraySavingOptions,
    writer: Writer,
    element_bytes: Mapping[int, int],
    limits: FrameLimits,
) -> Arrays:
    """Cuts arrays into chunks, and says which of them this process writes.

    Args:
        array_names: Under which they are stored.
        sources: The arrays.
        saving: How they are to be stored.
        writer: The process.
        element_bytes: Of the arrays that will be cast: bytes of an element then.
        limits: Of what is compressed.

    Raises:
        InvalidInput: The options of an array do not fit it.
        Unsupported: Its shards make no grid that a checkpoint could have.
    """
    storage = Storage.of(saving)
    most_slices = saving.max_replicas_for_replica_parallel or writer.process_count
    cutter = Cutter(
        writer,
        saving.min_slice_bytes_for_replica_parallel or MIN_SLICE_BYTES,
        1 if saving.use_replica_parallel is False else most_slices,
        storage.chunk_bytes(limits),
    )
    zeros = np.zeros(_PAGE_BYTES, np.uint8)
    arrays = Arrays(array_names, sources, [], [], storage, zeros)
    for number, (name, source) in enumerate(zip(array_names, sources, strict=True)):
        nbytes = element_bytes.get(number) or _element_bytes(source)
        found = cutter.cut(source, nbytes, storage_options(saving, name, source))
        arrays.cuts.append(found)
        for own in found.own:
            chunk = chunk_of(number, source, found.grid.box(own), source.blocks)
            arrays.values.append(Value(own, _filled_up(chunk, source, found.grid.chunk_shape, zeros)))
    return arrays


def _element_bytes(source: ArraySource) -> int:
    return source.storage_item_bytes * math.prod(source.storage_shape[len(source.shape) :])


def _filled_up(chunk: Chunk, source: ArraySource, chunk_shape: grid.Shape, zeros: NDArray[np.uint8]) -> Chunk:
    """A chunk at the edge of its array as one of full size: beyond the array it holds zeros."""
    rank = len(source.shape)
    full = chunk_shape + source.storage_shape[rank:]
    if chunk.shape == full:
        return chunk
    blocks = list(chunk.blocks)
    present = list(chunk.shape)
    for axis in range(rank):
        if present[axis] < full[axis]:
            offset = tuple(present[axis] if at == axis else 0 for at in range(len(full)))
            extents = [*present]
            extents[axis] = full[axis] - present[axis]
            address = zeros.ctypes.data
            blocks.append(Block(offset, tuple(extents), (0,) * len(full), address, zeros))
            present[axis] = full[axis]
    nbytes = math.prod(full) * source.storage_item_bytes
    return Chunk(chunk.array, chunk.offset or (0,) * len(full), full, nbytes, blocks)


def check_paths(arrays: Arrays) -> None:
    """Refuses names of which the files would be in each other's way, or in that of the metadata.

    Raises:
        InvalidInput: There are such names.
    """
    if arrays.storage.use_ocdbt:
        return
    own, present = (
        {names.TREE_METADATA, names.SHARDINGS, names.STRINGS, names.ARRAY_METADATAS},
        set(arrays.names),
    )
    for name in arrays.names:
        first, *others = parts = name.split("/")
        is_nested = any(
            "/".join(parts[: end + 1]) in present and arrays.is_file_of_array(below)
            for end, below in enumerate(others)
        )
        if first in own or is_nested:
            raise InvalidInput(
                f"the files of the array {name!r} would be where other files of the checkpoint are; rename "
                "it, or save with array.saving.use_ocdbt = True, which makes no file for each array",
                array=name,
            )


# ---- files -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Planned:
    """The files of one process, of chunks that are stored as they are.

    Attributes:
        files: In writing order; names are paths from the directory of the checkpointable.
        data_files: Of OCDBT: what each of them is to the database.
        places: Of each value its file, offset and length.
        positions: Of each value where it begins among the bytes of all files.
        data_bytes: Bytes of all files.
        owners: What keeps memory alive that is written, besides the chunks.
        checksums: Of each value its CRC-32C, which is written after it: to be filled in before that. Empty if
            chunks have none.
    """

    files: list[PlannedFile]
    data_files: list[write_ocdbt.DataFile]
    places: NDArray[np.int64]
    positions: NDArray[np.int64]
    data_bytes: int
    owners: list[Any]
    checksums: NDArray[np.uint32]

    def positions_of(
        self, ranges: Sequence[tuple[int, int]], values: Sequence[Value]
    ) -> list[tuple[int, int]]:
        """Where ranges of the bytes of all chunks, in their `copy_order`, are in the files."""
        order = write_plan.copy_order([value.chunk for value in values])
        begins = itertools.accumulate((values[number].chunk.nbytes for number in order), initial=0)
        found = []
        for number, begin in zip(order, begins, strict=False):
            end = begin + values[number].chunk.nbytes
            shift = int(self.positions[number]) - begin
            for first, last in ranges:
                if first < end and begin < last:
                    found.append((max(first, begin) + shift, min(last, end) + shift))
        return sorted(found)


def plan(arrays: Arrays, process: int) -> Planned:
    """Plans the files of chunks that are stored as they are; the addresses of their memory must be final."""
    files: list[PlannedFile] = []
    data_files: list[write_ocdbt.DataFile] = []
    checksums = np.zeros(len(arrays.values) if arrays.storage.has_checksums else 0, "<u4")
    owners: list[Any] = [arrays.zeros, checksums]
    numbers: list[int] = []  # of the values, file after file
    rows: list[tuple[int, int, int, int]] = []  # of each its place, and where its file begins among all bytes
    end = 0
    for group in _data_files(arrays) if arrays.storage.use_ocdbt else _plain_files(arrays):
        file = _File(arrays.zeros)
        offsets = [
            file.add(arrays, arrays.values[number], checksums[number : number + 1]) for number in group
        ]
        lengths = [arrays.values[number].chunk.nbytes + checksums[:1].nbytes for number in group]
        if arrays.storage.use_ocdbt:
            data_files.append(write_ocdbt.new_data_file(names.ocdbt_process(process) + "/"))
            name = "".join(data_files[-1])
        else:
            first = arrays.values[group[0]]
            name = arrays.key(first.chunk.array, first.number)
            if arrays.is_inner(first.chunk.array):
                owners.append(file.add_bytes(shard_index.encode(offsets, lengths)))
        numbers += group
        rows += zip(itertools.repeat(len(files)), offsets, lengths, itertools.repeat(end))
        files.append(PlannedFile(name, b"", file.end, np.asarray(file.words, np.int64)))
        end += file.end
    found = np.zeros((len(arrays.values), 4), np.int64)
    found[numbers] = np.array(rows, np.int64).reshape(-1, 4)
    return Planned(files, data_files, found[:, :3], found[:, 3] + found[:, 1], end, owners, checksums)


class _File:
    """A file that is being planned."""

    def __init__(self, zeros: NDArray[np.uint8]) -> None:
        self.words: list[int] = []
        self.end = 0
        self._zeros = zeros

    def add(self, arrays: Arrays, value: Value, checksum: NDArray[np.uint32]) -> int:
        """Appends a chunk and its checksum, if it has one; returns where it begins."""
        chunk = value.chunk
        step = _PAGE_BYTES if chunk.nbytes >= _PAGED_BYTES else _LINE_BYTES
        padding = -self.end % step
        if padding:
            self._add_memory(self._zeros, padding)
        begin = self.end
        self.words += write_plan.segment_words(begin, chunk, arrays.sources[chunk.array].storage_item_bytes)
        self.end += chunk.nbytes
        if checksum.nbytes:
            self._add_memory(checksum, checksum.nbytes)
        return begin

    def add_bytes(self, content: bytes) -> NDArray[np.uint8]:
        """Appends bytes; returns what keeps them."""
        kept = np.frombuffer(content, np.uint8)
        self._add_memory(kept, len(content))
        return kept

    def _add_memory(self, memory: NDArray[Any], nbytes: int) -> None:
        self.words += _plans.byte_segment(self.end, nbytes, memory.ctypes.data)
        self.end += nbytes


def _data_files(arrays: Arrays) -> Iterator[list[int]]:
    """The values of each data file, in the order in which they stand in it."""
    sizes = [value.chunk.nbytes for value in arrays.values]
    group: list[int] = []
    held = 0
    for number in write_plan.copy_order([value.chunk for value in arrays.values]):
        if group and held + sizes[number] > arrays.storage.file_bytes:
            yield group
            group, held = [], 0
        group.append(number)
        held += sizes[number]
    if group:
        yield group


def _plain_files(arrays: Arrays) -> Iterator[list[int]]:
    """The values of each plain file: one, or all inner chunks of an array in order."""
    numbered = enumerate(arrays.values)
    for array, own in itertools.groupby(numbered, lambda pair: pair[1].chunk.array):
        numbers = [number for number, _ in own]
        yield from [numbers] if arrays.is_inner(array) else ([number] for number in numbers)
