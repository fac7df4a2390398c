"""Open safetensors files as a state that can be read: what is in them, and reads of boxes of it.

Invariants: every extent that is read lies in its file, as the checked header says; after a read every file
that was read is still what it was when its header was checked, or the read fails: bytes of two versions of a
file never come back as one tensor. Tensors are numbered in the order of the files and of the data in them.
"""

from __future__ import annotations

import collections
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation import _plans, storage
from waystation._collection import paused_collection
from waystation._distinct import distinct
from waystation._errors import Conflict, WaystationError
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.grid import Box, contiguous_strides, volume
from waystation.layouts.native import read_job
from waystation.layouts.opened import Destinations, Job, ReadStatistics
from waystation.safetensors.arriving import Arriving, ReadJob
from waystation.safetensors.checksums import FileChecksums, blocks_of, checksums_of, require_checksums
from waystation.safetensors.description import stored_as
from waystation.safetensors.headers import Header, Tensor, check_unchanged
from waystation.safetensors.readable import Boxes, Readable

# On either side of a stretch the engine reads up to the next page, or, where blocks are verified, all of the
# block.
_LEAST_STRETCH_BYTES = 256 << 10
_LEAST_VERIFIED_STRETCH_BYTES = 8 << 20

# The caller's thread reads this in less than the half millisecond that a job of the engine takes to start.
_SMALL_BYTES = 1 << 20

# What one job has in flight from a store.
_REQUESTS = 16

# Of a process's descriptors, of which it may have no more than a thousand or so, and open as many models.
_MOST_HELD_FILES = 64

# Records of the engine, the files that these count, and of each record the place of its file, and its tensor.
_Words: TypeAlias = tuple[NDArray[np.int64], list[int], NDArray[np.int64], NDArray[np.int64]]

# The number of a tensor, a box of it, where that goes and with which strides (bytes).
PlacedBox: TypeAlias = tuple[int, Box, int, Sequence[int]]


# The files that are held open for small reads, the earliest first: who holds each, and its place there.
_held: collections.deque[tuple[weakref.ref[OpenFiles], int]] = collections.deque()


@dataclass(slots=True)
class _Wanted:
    """What is to be read.

    Attributes:
        whole: The numbers of tensors that are read whole, and where they go, in two columns.
        parts: The numbers of others, with the records of the engine for parts of them, without their files.
    """

    whole: NDArray[np.int64]
    parts: list[tuple[int, tuple[int, ...]]]


class OpenFiles(Readable):
    """The tensors of some files.

    Attributes:
        headers: Of the files.
        tensors: What the headers say of each, by number.
        labels: Their names.
        numbers: The number of each name.
    """

    def __init__(self, headers: Sequence[Header]) -> None:
        self.headers: list[Header] = list(headers)
        self.tensors: list[Tensor] = [tensor for header in headers for tensor in header.tensors]
        self.labels: list[str] = [tensor[0] for tensor in self.tensors]
        self.numbers: dict[str, int] = {name: number for number, name in enumerate(self.labels)}
        self._files = np.repeat(np.arange(len(headers)), [len(header.tensors) for header in headers])
        self._arrays: dict[tuple[Any, ...], StoredArray] = {}  # models have few shapes, and many tensors
        self._checksums: list[FileChecksums | None] | None = None  # until first needed
        # The last options of `is_small`, and of which files they allow it, as far as it was asked.
        self._small: tuple[Options | None, dict[int, bool]] = None, {}
        # The files of which small parts were read last, each by its place, open while somebody reads of it.
        self._parts: dict[int, storage.Parts] = {}

    @property
    def notices_absence(self) -> bool:
        """Whether a read fails where a file is missing: always."""
        return True

    @property
    def directory(self) -> str:
        """Where the files are: that of the first."""
        return os.path.dirname(self.headers[0].path)

    @property
    def path(self) -> str:
        """What messages and statistics call them: the file, or the directory of several."""
        return self.headers[0].path if len(self.headers) == 1 else self.directory

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

    def arrays(self, numbers: Sequence[int]) -> list[StoredArray]:
        """Some tensors as arrays are described, see `array`."""
        known, tensors = self._arrays, self.tensors
        return [known.get(tensors[number][1:3]) or self.array(number) for number in numbers]

    @cached_property
    def _spans(self) -> NDArray[np.int64]:
        """Where in its file each tensor begins and ends."""
        return np.array([tensor[3:] for tensor in self.tensors], np.int64).reshape(-1, 2)

    @property
    def numbered(self) -> dict[str, int]:
        """The tensors as a state: one dict."""
        return self.numbers

    @cached_property
    def _devices(self) -> list[int]:
        """What holds each file: a device of this system or an object store, by a number."""
        numbers: dict[tuple[object, int], int] = {}
        kept = [(header.source.engine, header.identity.device) for header in self.headers]
        return [numbers.setdefault(device, len(numbers)) for device in kept]

    def device_of(self, number: int) -> int:
        """The number of the device, or object store, that holds a tensor."""
        return self._devices[int(self._files[number])]

    def alternating(self, numbers: Sequence[int]) -> list[int]:
        """Tensors in an order in which those of each device, or store, come evenly, so that a read of the
        first so many keeps all of them busy. Those of one device stay in their order.

        Returns:
            Places in `numbers`.
        """
        devices = np.array(self._devices, np.int64)[self._files[np.array(numbers, np.int64)]]
        begins, ends = self._spans[np.array(numbers, np.int64)].T
        before = np.zeros(len(numbers), np.int64)  # bytes of the same device
        for device in distinct(devices).tolist():
            own = np.flatnonzero(devices == device)
            before[own] = np.cumsum((ends - begins)[own]) - (ends - begins)[own]
        return list(np.argsort(before, kind="stable").tolist())

    @property
    def is_on_several_devices(self) -> bool:
        """Whether there is more than one device, or store, that holds files."""
        return len(set(self._devices)) > 1

    @property
    def is_local(self) -> bool:
        """Whether all files are of this system, so that they can be mapped, and are cached by it."""
        return all(header.source.engine is None for header in self.headers)

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
        return self.headers[self._places[number]], begin, end

    def tensors_of(self, number: int) -> Sequence[int]:
        """The tensors that an array is made of: itself."""
        return (number,)

    def is_small(self, number: int, nbytes: int, options: Options) -> bool:
        """Whether `read_small` reads so many bytes of a tensor: few, not verified, no options how to read."""
        if nbytes > _SMALL_BYTES:
            return False
        known, small_files = self._small
        if known is not options:  # they seldom change from one read to the next
            small_files = {}
            self._small = options, small_files
        place = self._places[number]
        is_small = small_files.get(place)
        if is_small is None:
            engine, verify = options.engine, options.array.loading.verify
            is_refused = bool(verify or engine.read_mode or engine.throttle_path)
            is_small = small_files[place] = not is_refused and self._checksums_of([place], verify) == [None]
        return is_small

    def read_small(
        self, number: int, offset: int, form: np.dtype[Any], shape: tuple[int, ...], nbytes: int
    ) -> NDArray[Any]:
        """Reads a part of a tensor that lies in one piece in the file, on the thread of the caller.

        Args:
            number: Of the tensor.
            offset: Where in its bytes the part begins.
            form: What the bytes of the part are.
            shape: The same.
            nbytes: How many there are; not 0.

        Raises:
            Conflict: The file changed.
        """
        place = self._places[number]
        memory = np.empty(nbytes + storage.SLACK_BYTES, np.uint8)
        try:
            parts = self._parts.get(place) or self._hold(place)
            first = parts.read(self.tensors[number][3] + offset, nbytes, memory)
        except Conflict:
            self.headers[place].check_unchanged()  # which tells more of what is at the path
            raise
        return np.ndarray(shape, form, memory, first)

    @cached_property
    def _places(self) -> list[int]:
        """The file of each tensor."""
        return self._files.tolist()

    def _hold(self, place: int) -> storage.Parts:
        """A file held open for the next small reads, in place of the one that the process holds longest."""
        with self.headers[place].opened() as file:
            parts = file.parts()
        self._parts[place] = parts
        # Without a lock, which a fork could leave locked in the child: a file is at worst opened twice.
        _held.append((weakref.ref(self), place))
        with contextlib.suppress(IndexError):
            while len(_held) > _MOST_HELD_FILES:
                holder, earliest = _held.popleft()
                held_by = holder()
                if held_by is not None:
                    held_by._parts.pop(earliest, None)
        return parts

    def close(self) -> None:
        """Lets go of the files that are held open; a small read opens them again."""
        self._parts.clear()

    def start_boxes(
        self,
        boxes: Boxes,
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        *,
        announce: bool,
    ) -> Arriving:
        """Starts to read boxes to where they go, see `Readable.start_boxes`."""
        wanted = self._wanted(boxes, destinations.addresses)
        return self._start(
            wanted, sum(boxes.sizes), destinations, options, on_job, statistics, announce=announce
        )

    def start_placed(
        self,
        tensors: Sequence[tuple[int, int]],
        boxes: Sequence[PlacedBox],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        *,
        announce: bool = False,
        among: tuple[int, int] | None = None,
    ) -> Arriving:
        """Starts to read tensors and boxes of tensors to addresses, all at once.

        Args:
            tensors: The numbers of tensors that are read whole, and where they go.
            boxes: Which boxes of others go where; none without elements.
            destinations: The memory in which that is.
            options: How.
            on_job: Told of every job.
            statistics: Where what was read is added.
            announce: Whether the result can tell of each tensor when it is there.
            among: The number of this process, and of how many that read the same, see `read_job.start`.

        Raises:
            Conflict: A file changed.
        """
        parts: list[tuple[int, tuple[int, ...]]] = []
        nbytes = 0
        for number, box, address, strides in boxes:
            item_bytes = dtypes.of_stored(self.array(number)).host.itemsize
            parts.append((number, self._part(number, item_bytes, box, address, strides)))
            nbytes += volume(box) * item_bytes
        whole = np.array(tensors, np.int64).reshape(-1, 2)
        begins, ends = self._spans[whole[:, 0]].T
        nbytes += int((ends - begins).sum())
        wanted = _Wanted(whole[ends > begins], parts)
        return self._start(
            wanted, nbytes, destinations, options, on_job, statistics, announce=announce, among=among
        )

    @paused_collection()
    def _wanted(self, boxes: Boxes, addresses: NDArray[np.int64]) -> _Wanted:
        """What of the boxes are whole tensors, and what are parts of them."""
        numbers = np.repeat([request.array for request in boxes.requests], boxes.counts)
        sizes = np.array(boxes.sizes, np.int64)
        begins, ends = self._spans[numbers].T
        is_whole = sizes == ends - begins  # since boxes lie in their tensors
        whole = np.stack([numbers, addresses], axis=1)[is_whole & (sizes > 0)]
        chosen = np.flatnonzero(~is_whole & (sizes > 0)).tolist()
        if not chosen:
            return _Wanted(whole, [])
        places = [
            (request.array, form.itemsize, box)
            for request, form in zip(boxes.requests, boxes.forms, strict=True)
            for box in request.boxes
        ]
        parts: list[tuple[int, tuple[int, ...]]] = []
        for place in chosen:
            number, item_bytes, box = places[place]
            strides = contiguous_strides(box[1], item_bytes)
            parts.append((number, self._part(number, item_bytes, box, int(addresses[place]), strides)))
        return _Wanted(whole, parts)

    def _part(
        self, number: int, item_bytes: int, box: Box, address: int, strides: Sequence[int]
    ) -> tuple[int, ...]:
        """What plans say of a part of a tensor."""
        return _plans.part(item_bytes, self.array(number).shape, *box, address, strides)

    @paused_collection()
    def _words(self, wanted: _Wanted) -> _Words:
        """The records of `_native.start_read`, the files that they count, and of each its file and tensor."""
        tensors_of_whole, addresses = wanted.whole.T
        own = self._files[tensors_of_whole]
        files_of_parts = [int(self._files[number]) for number, _ in wanted.parts]
        used = sorted({*distinct(own).tolist(), *files_of_parts})
        places_of_whole, places_of_parts = np.searchsorted(used, own), np.searchsorted(used, files_of_parts)
        begins, ends = self._spans[tensors_of_whole].T
        others: list[int] = []
        for place, (number, part) in zip(places_of_parts.tolist(), wanted.parts, strict=True):
            others += _plans.read(place, self.tensors[number][3], part)
        whole = _plans.byte_reads(places_of_whole, begins, ends - begins, addresses)
        words = np.concatenate([whole, np.array(others, np.int64)])
        files = np.concatenate([places_of_whole, places_of_parts]).astype(np.int64)
        tensors = np.concatenate([tensors_of_whole, [number for number, _ in wanted.parts]]).astype(np.int64)
        return words, used, files, tensors

    def _by_device(self, wanted: _Wanted) -> list[_Wanted]:
        """What is wanted of each device, or store, that holds files."""
        devices = self._devices
        if len(set(devices)) == 1:
            return [wanted] if len(wanted.whole) or wanted.parts else []
        shares: list[_Wanted] = []
        of_whole = np.array(devices)[self._files[wanted.whole[:, 0]]]
        for device in dict.fromkeys(devices):
            whole = wanted.whole[of_whole == device]
            parts = [part for part in wanted.parts if self.device_of(part[0]) == device]
            if len(whole) or parts:
                shares.append(_Wanted(whole, parts))
        return shares

    def _start(
        self,
        wanted: _Wanted,
        nbytes: int,
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        *,
        announce: bool = False,
        among: tuple[int, int] | None = None,
    ) -> Arriving:
        """Starts a job of the engine for each device, or store, that holds files, all at once, so that all
        are busy."""
        planned = [self._words(share) for share in self._by_device(wanted)]
        check_unchanged(self.headers[file] for _, used, *_ in planned for file in used)
        shared = read_job.shared(options, len(planned), requests=None if self.is_local else _REQUESTS)
        arriving = Arriving(nbytes, statistics, self._named)
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
                    root=self.headers[used[0]].source,
                    versions=[self.headers[file].identity.tag for file in used],
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
