"""Open safetensors files as a state that can be read: what is in them, and reads of boxes of it.

Invariants: every extent that is read lies in its file, as the checked header says; after a read every file
that was read is still what it was when its header was checked, or the read fails: bytes of two versions of a
file never come back as one tensor. Tensors are numbered in the order of the files and of the data in them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation._collection import paused_collection
from waystation._errors import WaystationError
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.frameworks.storage import StorageMetadata
from waystation.grid import Box, contiguous_strides, volume
from waystation.layouts.native import memory, read_job
from waystation.layouts.native.destinations import Destinations
from waystation.layouts.native.read import Allocate, Request, as_array
from waystation.layouts.native.read_job import ReadStatistics
from waystation.layouts.native.tree_file import ArrayLeaf, Leaf, TreeFile
from waystation.safetensors.arriving import Arriving, ReadJob
from waystation.safetensors.checksums import FileChecksums, blocks_of, checksums_of, require_checksums
from waystation.safetensors.description import Described, stored_as
from waystation.safetensors.headers import Header, Tensor, check_unchanged
from waystation.tree import flatten

_WHOLE_WORDS = 5  # of a record of the engine without axes

# On either side of a stretch the engine reads up to the next page, or, where blocks are verified, all of the
# block.
_LEAST_STRETCH_BYTES = 256 << 10
_LEAST_VERIFIED_STRETCH_BYTES = 8 << 20

# Records of the engine, the files that these count, and of each record the place of its file, and its tensor.
_Words: TypeAlias = tuple[NDArray[np.int64], list[int], NDArray[np.int64], NDArray[np.int64]]

# The number of a tensor, a box of it, where that goes and with which strides (bytes).
PlacedBox: TypeAlias = tuple[int, Box, int, Sequence[int]]


@dataclass(slots=True)
class _Wanted:
    """What is to be read.

    Attributes:
        plain: The numbers of tensors that are read whole, and where they go.
        parts: The numbers of others, with the records of the engine for parts of them, without their files.
        nbytes: What all that has.
    """

    plain: list[tuple[int, int]]
    parts: list[tuple[int, list[int]]]
    nbytes: int


class OpenFiles:
    """The tensors of some files.

    Attributes:
        headers: Of the files.
        tensors: What the headers say of each, by number.
        labels: Their names.
        numbers: The number of each name.
    """

    def __init__(self, headers: Sequence[Header]) -> None:
        self.headers = list(headers)
        self.tensors: list[Tensor] = [tensor for header in headers for tensor in header.tensors]
        self.labels = [tensor[0] for tensor in self.tensors]
        self.numbers = {name: number for number, name in enumerate(self.labels)}
        self._files = np.repeat(np.arange(len(headers)), [len(header.tensors) for header in headers])
        self._arrays: dict[tuple[Any, ...], StoredArray] = {}  # models have few shapes, and many tensors
        self._checksums: list[FileChecksums | None] | None = None  # until first needed

    @property
    def directory(self) -> str:
        """Where the files are: that of the first."""
        return os.path.dirname(self.headers[0].path)

    def path_of(self, number: int) -> str:
        """The file of a tensor."""
        return self.headers[int(self._files[number])].path

    def array(self, number: int) -> StoredArray:
        """A tensor as arrays are described; those of equal tensors are one object.

        Raises:
            Unsupported: No framework has its dtype.
        """
        tensor = self.tensors[number]
        kind = tensor[1:3]  # its dtype and shape
        found = self._arrays.get(kind)
        if found is None:
            try:
                found = self._arrays[kind] = stored_as(tensor)
            except WaystationError as error:
                raise error.where(tensor=self.labels[number], path=self.path_of(number))
        return found

    @cached_property
    def tree(self) -> TreeFile:
        """The tensors as a state: one dict."""
        numbers, structure = flatten(self.numbers)
        leaves: list[Leaf] = [ArrayLeaf(number) for number in numbers]
        return TreeFile(structure, leaves, Described(len(self.tensors), self.array), self.labels)

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How a tensor is cut: not at all."""
        shape = self.array(number).shape
        return StorageMetadata(shape, shape)

    def device_of(self, number: int) -> int:
        """The device that holds a tensor, as the system numbers those of file systems."""
        return self.headers[int(self._files[number])].identity.device

    def least_stretch_bytes(self, verify: bool | None) -> int:
        """How long what is read without a gap has to be, at least, so that little is read in vain.

        Raises:
            InvalidInput: Blocks are to be verified, and a file has no checksums.
        """
        checksums = self._checksums_of(range(len(self.headers)), verify)
        is_verified = any(blocks is not None for blocks in checksums)
        return _LEAST_VERIFIED_STRETCH_BYTES if is_verified else _LEAST_STRETCH_BYTES

    def extent(self, number: int) -> tuple[Header, int, int]:
        """The file of a tensor, and where in it the data begin and end."""
        *_, begin, end = self.tensors[number]
        return self.headers[int(self._files[number])], begin, end

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        allocate: Allocate = memory.allocate,
    ) -> list[list[NDArray[Any]]]:
        """Reads every requested box into memory of its own, which `allocate` gives.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        forms = self._forms(requests)
        sizes = _sizes(requests, forms)
        places, addresses = allocate(sizes)
        destinations = Destinations(addresses, [place[0] for place in places])
        wanted = self._wanted(requests, forms, sizes, addresses)
        self._start(wanted, destinations, options, on_job, statistics).finish()
        remaining = iter(places)
        return [
            [as_array(next(remaining), box[1], form.host) for box in request.boxes]
            for request, form in zip(requests, forms, strict=True)
        ]

    def read_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
    ) -> None:
        """Reads every requested box to given memory, that of devices above all; whatever used that before
        must have been waited for.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        self.start_to_devices(requests, destinations, options, on_job, statistics, announce=False).finish()

    def start_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        *,
        announce: bool = True,
    ) -> Arriving:
        """Starts what `read_to_devices` does; the result tells of each tensor when it is there."""
        forms = self._forms(requests)
        wanted = self._wanted(requests, forms, _sizes(requests, forms), destinations.addresses)
        return self._start(wanted, destinations, options, on_job, statistics, announce=announce)

    def tensors_of(self, number: int) -> Sequence[int]:
        """The tensors that an array is made of: itself."""
        return (number,)

    def start_placed(
        self,
        boxes: Sequence[PlacedBox],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        *,
        announce: bool = False,
        among: tuple[int, int] | None = None,
    ) -> Arriving:
        """Starts to read boxes of tensors to addresses, all at once.

        Args:
            boxes: What goes where; none without elements.
            destinations: The memory in which that is.
            options: How.
            on_job: Told of every job.
            statistics: Where what was read is added.
            announce: Whether the result can tell of each tensor when it is there.
            among: The number of this process, and of how many that read the same, see `read_job.start`.

        Raises:
            Conflict: A file changed.
        """
        wanted = _Wanted([], [], 0)
        for number, box, address, strides in boxes:
            stored = self.array(number)
            item_bytes = dtypes.of_stored(stored).host.itemsize
            part = self._part(number, stored.shape, item_bytes, box, address, strides)
            wanted.parts.append((number, part))
            wanted.nbytes += volume(box) * item_bytes
        return self._start(wanted, destinations, options, on_job, statistics, announce=announce, among=among)

    def _forms(self, requests: Sequence[Request]) -> list[dtypes.LogicalDtype]:
        """The dtype of each request."""
        stored = [self.array(request.array) for request in requests]
        forms = {
            id(array): dtypes.of_stored(array) for array in {id(array): array for array in stored}.values()
        }
        return [forms[id(array)] for array in stored]

    @paused_collection()
    def _wanted(
        self,
        requests: Sequence[Request],
        forms: Sequence[dtypes.LogicalDtype],
        sizes: Sequence[int],
        addresses: NDArray[np.int64],
    ) -> _Wanted:
        wanted = _Wanted([], [], sum(sizes))
        places = zip(addresses.tolist(), sizes, strict=True)
        for request, form in zip(requests, forms, strict=True):
            number, shape = request.array, self.array(request.array).shape
            for box, (address, nbytes) in zip(request.boxes, places, strict=False):
                if nbytes and box[1] == shape:
                    wanted.plain.append((number, address))
                elif nbytes:
                    strides = contiguous_strides(box[1], form.host.itemsize)
                    part = self._part(number, shape, form.host.itemsize, box, address, strides)
                    wanted.parts.append((number, part))
        return wanted

    def _part(
        self,
        number: int,
        shape: tuple[int, ...],
        item_bytes: int,
        box: Box,
        address: int,
        strides: Sequence[int],
    ) -> list[int]:
        """The record of a part of a tensor, without its file."""
        begin = self.tensors[number][3]
        return [begin, item_bytes, len(shape), *shape, *box[0], *box[1], address, *strides]

    @paused_collection()
    def _words(self, wanted: _Wanted) -> _Words:
        """The records of `_native.start_read`, the files that they count, and of each its file and tensor."""
        chosen = np.array(wanted.plain, np.int64).reshape(-1, 2)
        own = self._files[chosen[:, 0]]
        files_of_parts = [int(self._files[number]) for number, _ in wanted.parts]
        used = sorted({*np.unique(own).tolist(), *files_of_parts})
        records = np.zeros((len(wanted.plain), _WHOLE_WORDS), np.int64)
        records[:, 0] = np.searchsorted(used, own) if used else 0
        records[:, 1] = [self.tensors[number][3] for number, _ in wanted.plain]
        records[:, 2] = [self.tensors[number][4] - self.tensors[number][3] for number, _ in wanted.plain]
        records[:, 4] = chosen[:, 1]
        places = {file: place for place, file in enumerate(used)}
        others = [
            word
            for file, (_, record) in zip(files_of_parts, wanted.parts, strict=True)
            for word in (places[file], *record)
        ]
        words = np.concatenate([records.ravel(), np.array(others, np.int64)])
        files = np.concatenate([records[:, 0], [places[file] for file in files_of_parts]]).astype(np.int64)
        tensors = np.concatenate([chosen[:, 0], [number for number, _ in wanted.parts]]).astype(np.int64)
        return words, used, files, tensors

    def _by_device(self, wanted: _Wanted) -> list[_Wanted]:
        """What is wanted of each device that holds files."""
        if len({header.identity.device for header in self.headers}) == 1:
            return [wanted] if wanted.plain or wanted.parts else []
        found: dict[int, _Wanted] = {}
        for pair in wanted.plain:
            found.setdefault(self.device_of(pair[0]), _Wanted([], [], 0)).plain.append(pair)
        for part in wanted.parts:
            found.setdefault(self.device_of(part[0]), _Wanted([], [], 0)).parts.append(part)
        return list(found.values())

    def _start(
        self,
        wanted: _Wanted,
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        *,
        announce: bool = False,
        among: tuple[int, int] | None = None,
    ) -> Arriving:
        """Starts a job of the engine for each device that holds files, all at once, so that all are busy."""
        planned = [self._words(share) for share in self._by_device(wanted)]
        check_unchanged(self.headers[file] for _, used, *_ in planned for file in used)
        shared = read_job.shared(options, len(planned))
        arriving = Arriving(wanted.nbytes, statistics, self._named)
        try:
            for words, used, places, tensors in planned:
                files = self._to_read(used, options.array.loading.verify)
                job = read_job.start(
                    files,
                    words,
                    destinations.owner,
                    shared,
                    destinations.regions,
                    announce=announce,
                    among=among,
                )
                arriving.add(ReadJob(job, [self.headers[file] for file in used], places, tensors))
                on_job(job)
        except BaseException as error:
            arriving.fail(error)
        return arriving

    def _to_read(self, used: Sequence[int], verify: bool | None) -> list[read_job.ReadFile]:
        return [
            (self.headers[file].path, self.headers[file].identity.nbytes, blocks)
            for file, blocks in zip(used, self._checksums_of(used, verify), strict=True)
        ]

    def _checksums_of(self, used: Sequence[int], verify: bool | None) -> list[bytes | None]:
        """The block checksums of files, None where nothing is to be verified.

        Args:
            used: The files.
            verify: Whether to; None for files that have checksums.

        Raises:
            InvalidInput: There are none, and they are to be verified.
            Corrupt: They are of a file of another length.
        """
        if verify is False:
            return [None] * len(used)
        if self._checksums is None:
            self._checksums = checksums_of(self.headers)
        if verify:
            require_checksums([self.headers[file] for file in used], [self._checksums[file] for file in used])
        return [blocks_of(self.headers[file], self._checksums[file]) for file in used]

    def _named(self, error: WaystationError) -> WaystationError:
        """The error with the first tensor that it is about, if it is about a part of a file."""
        path, offset = error.context.get("path"), error.context.get("offset")
        file = next((place for place, header in enumerate(self.headers) if header.path == path), None)
        if file is None or offset is None:
            return error
        begin = int(offset)
        end = begin + int(error.context.get("length", 1))
        hit = (name for name, _, _, first, last in self.headers[file].tensors if first < end and last > begin)
        return error.where(tensor=next(hit, None))


def _sizes(requests: Sequence[Request], forms: Sequence[dtypes.LogicalDtype]) -> list[int]:
    """The bytes of each box."""
    return [
        math.prod(box[1]) * form.host.itemsize
        for request, form in zip(requests, forms, strict=True)
        for box in request.boxes
    ]
