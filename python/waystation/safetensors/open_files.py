"""Open safetensors files as a state that can be read: what is in them, and reads of boxes of it.

Invariants: every extent that is read lies in its file, as the checked header says; after a read every file
that was read is still what it was when its header was checked, or the read fails: bytes of two versions of a
file never come back as one tensor. Tensors are numbered in the order of the files and of the data in them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation._collection import paused_collection
from waystation._errors import Conflict, Corrupt, NotFound, Unsupported, WaystationError
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.frameworks.storage import StorageMetadata
from waystation.grid import Box, contiguous_strides, whole
from waystation.layouts.native import memory, read_job
from waystation.layouts.native.destinations import Destinations
from waystation.layouts.native.read import Allocate, Request, as_array
from waystation.layouts.native.read_job import ReadStatistics
from waystation.layouts.native.tree_file import ArrayLeaf, Leaf, TreeFile
from waystation.safetensors.checksums import FileChecksums, checksums_of, require_checksums
from waystation.safetensors.headers import Header, Tensor, check_unchanged
from waystation.tree import flatten

PACKED = "float4_e2m1fn_x2"  # two elements to a byte

_MOST_AXES = 64  # of NumPy
_MOST_ITEMS = 1 << 59
_WHOLE_WORDS = 5  # of a record of the engine without axes


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
        self._arrays: dict[int, StoredArray] = {}
        self._checksums: list[FileChecksums | None] | None = None  # until first needed

    @property
    def directory(self) -> str:
        """Where the files are: that of the first."""
        return os.path.dirname(self.headers[0].path)

    def path_of(self, number: int) -> str:
        """The file of a tensor."""
        return self.headers[int(self._files[number])].path

    def array(self, number: int) -> StoredArray:
        """A tensor as arrays are described.

        Raises:
            Unsupported: No framework has its dtype.
        """
        found = self._arrays.get(number)
        if found is None:
            try:
                found = self._arrays[number] = _stored(self.tensors[number])
            except WaystationError as error:
                raise error.where(tensor=self.labels[number], path=self.path_of(number))
        return found

    @cached_property
    def tree(self) -> TreeFile:
        """The tensors as a state: one dict."""
        numbers, structure = flatten(self.numbers)
        leaves: list[Leaf] = [ArrayLeaf(number) for number in numbers]
        return TreeFile(structure, leaves, _Arrays(self), self.labels)

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How a tensor is cut: not at all."""
        shape = self.array(number).shape
        return StorageMetadata(shape, shape)

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
        forms = [dtypes.of_stored(self.array(request.array)) for request in requests]
        places, addresses = allocate(_sizes(requests, forms))
        destinations = Destinations(addresses, [place[0] for place in places])
        self._read(requests, forms, destinations, options, on_job, statistics)
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
        forms = [dtypes.of_stored(self.array(request.array)) for request in requests]
        self._read(requests, forms, destinations, options, on_job, statistics)

    def _read(
        self,
        requests: Sequence[Request],
        forms: Sequence[dtypes.LogicalDtype],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
    ) -> None:
        sizes = _sizes(requests, forms)
        words, used = self._words(requests, forms, destinations.addresses, sizes)
        if used:
            self._run(words, used, destinations, options, on_job, statistics)
            statistics.bytes_needed += sum(sizes)

    @paused_collection()
    def _words(
        self,
        requests: Sequence[Request],
        forms: Sequence[dtypes.LogicalDtype],
        addresses: NDArray[np.int64],
        sizes: Sequence[int],
    ) -> tuple[NDArray[np.int64], list[int]]:
        """The records of `_native.start_read`, and the files that they count."""
        plain: list[tuple[int, int]] = []  # tensors that are read whole, and where they go
        parts: list[tuple[int, list[int]]] = []
        destinations = zip(addresses.tolist(), sizes, strict=True)
        for request, form in zip(requests, forms, strict=True):
            number, shape = request.array, self.array(request.array).shape
            for box, (address, nbytes) in zip(request.boxes, destinations, strict=False):
                if nbytes and box == whole(shape):
                    plain.append((number, address))
                elif nbytes:
                    parts.append((number, self._part(number, shape, form.host.itemsize, box, address)))
        chosen = np.array(plain, np.int64).reshape(-1, 2)
        own = self._files[chosen[:, 0]]
        files_of_parts = [int(self._files[number]) for number, _ in parts]
        used = sorted({*np.unique(own).tolist(), *files_of_parts})
        records = np.zeros((len(plain), _WHOLE_WORDS), np.int64)
        records[:, 0] = np.searchsorted(used, own) if used else 0
        records[:, 1] = [self.tensors[number][3] for number, _ in plain]
        records[:, 2] = [self.tensors[number][4] - self.tensors[number][3] for number, _ in plain]
        records[:, 4] = chosen[:, 1]
        places = {file: place for place, file in enumerate(used)}
        others = [
            word
            for file, (_, record) in zip(files_of_parts, parts, strict=True)
            for word in (places[file], *record)
        ]
        return np.concatenate([records.ravel(), np.array(others, np.int64)]), used

    def _part(
        self, number: int, shape: tuple[int, ...], item_bytes: int, box: Box, address: int
    ) -> list[int]:
        """The record of a part of a tensor, without its file."""
        strides = contiguous_strides(box[1], item_bytes)
        begin = self.tensors[number][3]
        return [begin, item_bytes, len(shape), *shape, *box[0], *box[1], address, *strides]

    def _run(
        self,
        words: NDArray[np.int64],
        used: Sequence[int],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
    ) -> None:
        """Runs one job of the engine; its files are the same before and after."""
        headers = [self.headers[file] for file in used]
        check_unchanged(headers)
        checksums = self._checksums_of(used, options.array.loading.verify)
        files = [
            (header.path, header.identity.nbytes, blocks)
            for header, blocks in zip(headers, checksums, strict=True)
        ]
        try:
            job = read_job.start(files, words, destinations.owner, options, destinations.regions)
            on_job(job)
            read_job.finish(job, statistics)
        except (Conflict, Corrupt, NotFound) as error:
            check_unchanged(headers)  # says better what has happened
            raise self._named(error)
        check_unchanged(headers)

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
        return [_blocks(self.headers[file], self._checksums[file]) for file in used]

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


class _Arrays(Sequence[StoredArray]):
    """The tensors as arrays are described, each when it is asked for: some may be of no use to anyone."""

    def __init__(self, opened: OpenFiles) -> None:
        self._opened = opened

    def __len__(self) -> int:
        return len(self._opened.tensors)

    def __getitem__(self, number: Any) -> Any:
        return self._opened.array(range(len(self))[number])


def _sizes(requests: Sequence[Request], forms: Sequence[dtypes.LogicalDtype]) -> list[int]:
    """The bytes of each box."""
    return [
        math.prod(box[1]) * form.host.itemsize
        for request, form in zip(requests, forms, strict=True)
        for box in request.boxes
    ]


def _blocks(header: Header, checksums: FileChecksums | None) -> bytes | None:
    if checksums is None:
        return None
    if checksums.nbytes != header.identity.nbytes:
        raise Corrupt(
            f"the file has {header.identity.nbytes} bytes, and had {checksums.nbytes} when it was summed; "
            "use another copy of it",
            path=header.path,
        )
    return checksums.blocks


def describe(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """The shape and logical dtype of the array that a tensor becomes; of what no framework has, those in the
    header."""
    _, storage_dtype, shape, _, _ = tensor
    if storage_dtype == "F4" and shape and shape[-1] % 2 == 0:
        return (*shape[:-1], shape[-1] // 2), PACKED
    return shape, dtypes.name_of_storage(storage_dtype) or storage_dtype


def _stored(tensor: Tensor) -> StoredArray:
    _, storage_dtype, shape, _, _ = tensor
    # With an extent of 0 any others fit into no bytes, but not into what frameworks count in.
    if len(shape) > _MOST_AXES or math.prod(filter(None, shape)) > _MOST_ITEMS:
        raise Unsupported(f"no framework has arrays of the shape {shape}; leave the tensor out (select)")
    if storage_dtype == "F4":
        if not shape or shape[-1] % 2:
            raise Unsupported(
                f"a tensor of F4 with the shape {shape} does not fill whole bytes along its last axis, as "
                "frameworks want; leave it out (select)"
            )
        packed = (*shape[:-1], shape[-1] // 2)
        return StoredArray(packed, PACKED, "torch", "U8", (*packed, 1), None, {})
    logical = dtypes.name_of_storage(storage_dtype)
    if logical is None:
        raise Unsupported(
            f"no framework has arrays of {storage_dtype}, which the tensor is of; leave it out (select)"
        )
    return StoredArray(shape, logical, "numpy", storage_dtype, shape, None, {})
