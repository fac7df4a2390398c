"""An opened tree of Orbax's, and how boxes of its arrays are read.

There are two ways. Arrays whose chunks are stored as they are, each key in a file of its own, are read by the
engine: only the bytes that are needed, to where they are needed. All others are read by
TensorStore (`tensor_store.py`). The engine verifies what it reads where Waystation has written the checkpoint
(`checksums.py`). Orbax stores no checksums of data; chunks that have one of their own, as zarr 3 allows, are
verified by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from waystation import _plans, storage
from waystation._collection import paused_collection
from waystation._errors import InvalidInput, WaystationError
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.storage import StorageMetadata
from waystation.grid import Box, slices_of_box, volume
from waystation.layouts.native import memory
from waystation.layouts.native.memory import as_array
from waystation.layouts.opened import Allocate, ReadStatistics, Request, StoredTree
from waystation.layouts.orbax import frame_reader
from waystation.layouts.orbax.checksums import FileChecksums
from waystation.layouts.orbax.chunk_places import ChunkPlaces, NamedArray, Part, PartRead, name_array
from waystation.layouts.orbax.engine import Engine
from waystation.layouts.orbax.paths import comparable
from waystation.layouts.orbax.tensor_store import BoxRead, StoreJob, TensorStore
from waystation.layouts.orbax.values import Files, Values
from waystation.layouts.orbax.zarr import ZarrArray
from waystation.tree import Structure

Buffer = np.ndarray[Any, Any]

_IN_FLIGHT_BYTES = 1 << 30  # where no bound is set


class OrbaxTree(StoredTree):
    """The tree of a checkpoint of Orbax's, which says less of containers than one of ours."""

    __slots__ = ()

    def comparable(self, structure: Structure) -> Structure:
        """What Orbax would store of the structure."""
        return comparable(structure)


class OpenOrbax:
    """A tree whose metadata has been read.

    Args:
        directory: Where its files are.
        tree: Its structure and leaves.
        arrays: How its arrays are stored, by number.
        is_ocdbt: Whether they are in an OCDBT database.
        absent_is_damage: Whether a chunk that is not there is missing, or stands for the fill value.
        values: Where chunks are; None if only TensorStore can tell.
        checksums: What vouches for its files; None where Orbax has written it.
        root: The directory beneath which files are opened; without it, they are by their paths.

    Attributes:
        directory: Where its files are.
        tree: Its structure and leaves.
    """

    def __init__(
        self,
        directory: str,
        tree: OrbaxTree,
        arrays: Sequence[NamedArray],
        *,
        is_ocdbt: bool,
        absent_is_damage: bool,
        values: Values | None,
        checksums: FileChecksums | None,
        root: storage.Root | None = None,
    ) -> None:
        self.directory = directory
        self._root = root
        self.tree = tree
        self._arrays = arrays
        self._is_ocdbt = is_ocdbt
        self._absent_is_damage = absent_is_damage
        self._places = (
            None if values is None else ChunkPlaces(arrays, values, absent_is_damage=absent_is_damage)
        )
        self._checksums = checksums
        self._store: TensorStore | None = None

    read_to_devices = None
    read_over = None
    mapped = None

    @property
    def notices_absence(self) -> bool:
        """Whether a chunk that is not there is missing; else it stands for the fill value. In a store it may
        be of the next checkpoint at the path, whose files have the same names."""
        return self._absent_is_damage and not storage.is_in_store(self.directory)

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How one of its arrays is cut."""
        stored = self.tree.arrays[number]
        chunk_shape = self._arrays[number].zarr.read_shape[: len(stored.shape)]
        return StorageMetadata.of(stored.shape, chunk_shape, stored.sharding)

    def arrays_at(self, path: str, begin: int, end: int) -> list[str]:
        """Labels of the arrays that have bytes in a range of a data file."""
        extents = [] if self._places is None else self._places.extents()
        found = {
            array
            for array, value in extents
            if value.path == path and value.offset < end and value.offset + value.nbytes > begin
        }
        return [self.tree.labels[array] for array in sorted(found)]

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        allocate: Allocate = memory.allocate,
    ) -> list[list[Buffer]]:
        """Reads every requested box into memory of its own, which `allocate` gives.

        Returns:
            For each request an array per box, C-contiguous, of the stored dtype.

        Raises:
            InvalidInput: Checksums are to be verified, and there are none.
            Corrupt: Something is missing or damaged.
            Unsupported: It is stored in a way that needs TensorStore, which is not installed.
        """
        verify = options.array.loading.verify
        if verify:
            self._require_checksums(requests)
        forms = [dtypes.of_stored(self.tree.arrays[request.array]) for request in requests]
        flat = [
            (request.array, _stored_box(box, form), form.host)
            for request, form in zip(requests, forms, strict=True)
            for box in request.boxes
        ]
        engine = Engine(options, on_job, statistics, None if verify is False else self._checksums, self._root)
        own, others = self._divide([(array, box) for array, box, _ in flat])
        located = []
        if self._places is not None:  # before anything is allocated for what files claim to have
            located = self._places.locate([flat[number][:2] for number in own], engine.read)
        sizes = [volume(box) * host.itemsize for _, box, host in flat]
        places, _ = allocate(sizes)
        buffers = [as_array(place, box[1], host) for place, (_, box, host) in zip(places, flat, strict=True)]
        read_chunks(
            self._arrays, located, [Destination(*flat[number][:2], buffers[number]) for number in own], engine
        )
        if others:
            reads = [
                BoxRead(self._arrays[flat[number][0]].name, flat[number][1], buffers[number])
                for number in others
            ]
            self._read_by_store(reads, options, on_job, statistics)
        statistics.bytes_needed += sum(sizes)
        remaining = iter(buffers)
        return [[next(remaining) for _ in request.boxes] for request in requests]

    def _require_checksums(self, requests: Sequence[Request]) -> None:
        """Refuses to verify arrays that nothing vouches for."""
        bare = [request.array for request in requests if not self._arrays[request.array].zarr.has_checksum]
        if bare and self._checksums is None:
            raise InvalidInput(
                f"'{self.directory}' has no checksums of data to verify: Waystation has not written it; "
                "leave the option array.loading.verify at None",
                path=self.directory,
                array=self._arrays[bare[0]].name,
            )

    def _divide(self, boxes: Sequence[tuple[int, Box]]) -> tuple[list[int], list[int]]:
        """Which boxes this package reads itself, and which TensorStore does."""
        own: list[int] = []
        others: list[int] = []
        for number, (array, box) in enumerate(boxes):
            if math.prod(box[1]):
                is_own = self._places is not None and self._arrays[array].zarr.is_known
                (own if is_own else others).append(number)
        return own, others

    def _read_by_store(
        self,
        reads: Sequence[BoxRead],
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
    ) -> None:
        if self._store is None:
            self._store = TensorStore(
                self.directory,
                is_ocdbt=self._is_ocdbt,
                version=self._arrays[0].zarr.version,
                absent_is_damage=self._absent_is_damage,
                root=self._root,
            )
        job = StoreJob(sum(read.buffer.nbytes for read in reads))
        on_job(job)
        self._store.read(reads, options.memory.read_concurrent_bytes or _IN_FLIGHT_BYTES, job)
        statistics.bytes_read += job.progress()[1]
        statistics.modes.add("tensorstore")


def _stored_box(box: Box, form: dtypes.LogicalDtype) -> Box:
    """A box in elements of the array as it is stored: PRNG keys have an axis of words more."""
    trailing = form.host_trailing
    return box[0] + (0,) * len(trailing), box[1] + trailing


class Destination(NamedTuple):
    """A box that is to be read, and where to."""

    array: int
    box: Box  # in elements as they are stored
    buffer: np.ndarray[Any, Any]  # C-contiguous


def read_chunks(
    arrays: Sequence[NamedArray],
    located: Sequence[list[Part]],
    destinations: Sequence[Destination],
    engine: Engine,
) -> None:
    """Reads the parts that `ChunkPlaces.locate` found of boxes into their buffers."""
    direct: list[PartRead] = []
    frames: list[PartRead] = []
    for parts, destination in zip(located, destinations, strict=True):
        array = arrays[destination.array]
        for part in parts:
            read = PartRead(array, part, destination.buffer)
            if part.chunk is None:
                destination.buffer[_own(part)] = array.zarr.fill_element()
            elif not array.zarr.is_direct or (array.zarr.has_checksum and engine.verifies_chunks):
                frames.append(read)
            elif part.chunk.value.content is not None:
                _copy(read, part.chunk.value.content)
            else:
                direct.append(read)
    _read_direct(direct, engine)
    frame_reader.read_frames(frames, engine)


def _own(part: Part) -> tuple[slice, ...]:
    return slices_of_box((part.in_box, part.shape))


def _copy(read: PartRead, content: bytes) -> None:
    """Takes a part out of a chunk that is in memory."""
    zarr, part = read.array.zarr, read.part
    assert part.chunk is not None
    chunk = _as_chunk(content, part.chunk.offset, zarr, read.buffer.dtype)
    read.buffer[_own(part)] = chunk[slices_of_box((part.in_chunk, part.shape))]


def _as_chunk(content: bytes, offset: int, zarr: ZarrArray, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.ndarray(zarr.read_shape, dtype, content, offset)


def _read_direct(reads: Sequence[PartRead], engine: Engine) -> None:
    files, words = _plan(reads)
    try:
        engine.read(files, words, [read.buffer for read in reads])
    except WaystationError as error:
        name_array(error, reads)
        raise


@paused_collection()
def _plan(reads: Sequence[PartRead]) -> tuple[Files, NDArray[np.int64]]:
    files = Files()
    words: list[int] = []
    for read in reads:
        chunk = read.part.chunk
        assert chunk is not None
        words += _plans.read(files.number(chunk.value), chunk.offset, read.planned())
    return files, np.asarray(words, np.int64)
