"""`stream`: the arrays of a published model one after another, for callers that place weights as they come.

Arrays come in the order of the files and of the data in them, so that a disk reads ahead; where files are on
several disks, those of each come evenly, so that all disks are read at a time. They are read in groups of
bounded size, the next while one is handed out. Invariant: what was read and not handed out yet, and
what is on its way to other devices or dtypes, stays within the bound, counted to the byte: of an array that
is larger than a group, too, the next is read meanwhile if there is room for it. What is larger than that is
read when it is its turn, and goes in pieces where it does not stay in host memory. What the engine brings to
devices itself takes next to no host memory: there groups are large, so that devices do not wait, and each
array is handed out as soon as it is on its devices, while those behind it are on their way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from waystation import _forks
from waystation._options import Options
from waystation.frameworks.base import Codec
from waystation.layouts.opened import ReadStatistics
from waystation.safetensors.choices import DType, Rename, Select
from waystation.safetensors.handle import Tensors
from waystation.safetensors.load import report
from waystation.safetensors.making import Framework, Made, OpenedTensors, calling_arrays_tensors
from waystation.safetensors.request import Placing, Request, decide, failures_of, options_of
from waystation.safetensors.sources import Files
from waystation.transfers import devices, staging
from waystation.transfers.buffers import Incoming, Reading, Region, aligned, fill_buffers
from waystation.transfers.filling import Filling
from waystation.transfers.handle import Progress
from waystation.transfers.pieces import read_ahead
from waystation.transfers.statistics import failures_published


def stream(
    files: Files | Tensors,
    *,
    framework: Framework,
    device: Any = None,
    sharding: Any = None,
    sharding_fn: Callable[[str, Any], Any] | None = None,
    dtype: DType = None,
    select: Select | None = None,
    rename: Rename | None = None,
    memory_limit: int | None = None,
    verify: bool | None = None,
    gpu_direct: bool | None = None,
) -> Generator[tuple[str, Any], None, None]:
    """Loads a published model array by array: yields name and array as they become ready, in file order.

    On GPUs each array is yielded as soon as all of it is there, whatever is still on its way. Closing the
    generator stops what is still being read. The parameters are those of `load`; `memory_limit`
    also bounds what is read ahead. Each array is the caller's alone: let go of it, and its memory is there
    for the next.

    Raises:
        NotFound, InvalidInput, Corrupt, Conflict, Unsupported: As `load` does, at the call what concerns all
            arrays.
    """
    with failures_of(files):
        request = decide(
            files,
            framework,
            Placing(device=device, sharding=sharding, sharding_fn=sharding_fn),
            dtype=dtype,
            select=select,
            rename=rename,
            options=options_of(memory_limit, verify, gpu_direct),
            mmap=False,
            nested=False,
            may_reshard=False,
            alternate=True,
            begun_s=time.monotonic(),
        )
    return _stream(request)


_GROUPS = 2  # of full size, for which there is room
_DEVICE_GROUP_BYTES = 512 << 20


@dataclass(slots=True)
class _Group:
    """Arrays that are read together.

    Attributes:
        arrays: In order.
        nbytes: The host memory that they take.
        device_bytes: That of devices, of those that the engine brings there itself.
        is_large: Whether it is one array that is larger than groups are.
        brought: Those that the engine has brought to their devices itself to be cast there, and what was
            made of them.
        bringing: Those that it brings there as they are stored.
        places: Their places among these, by leaf.
    """

    arrays: list[Incoming]
    nbytes: int
    is_large: bool
    device_bytes: int = 0
    brought: list[tuple[list[Incoming], list[Any]]] = field(default_factory=list)
    bringing: _Bringing | None = None
    places: dict[int, int] = field(default_factory=dict)


def _stream(request: Request) -> Generator[tuple[str, Any], None, None]:
    statistics = ReadStatistics()
    arrays = stream_arrays(request.opened, request.codec, request.incoming, request.options, statistics)
    owner = _forks.Owner()
    try:
        with failures_published("load", request.opened.path, request.begun_s), contextlib.closing(arrays):
            for name in request.wanted.names:
                yield name, next(arrays)  # kept by nobody here: it is the caller's alone
    except GeneratorExit:
        if owner.may_close:
            report(request, statistics, request.begun_s)
        raise
    report(request, statistics, request.begun_s)


def stream_arrays(
    opened: OpenedTensors,
    codec: Codec,
    arrays: Sequence[Incoming],
    options: Options,
    statistics: ReadStatistics | None = None,
) -> Generator[Any, None, None]:
    """Reads arrays and yields them in their order, see `stream`.

    Args:
        opened: What is read.
        codec: What makes the arrays.
        arrays: Where they go, numbered in their order.
        options: How to read; they bound the memory.
        statistics: Where what is read is counted.
    """
    progress = Progress()
    batches = [(codec, list(arrays))]
    filling = Filling(opened, options, progress, None, batches, in_groups=True, statistics=statistics)
    made = Made(opened, len(arrays))
    streaming = _Streaming(opened, codec, filling, made)
    groups = _groups(arrays, filling.group_bytes, streaming.on_devices)
    owner = _forks.Owner()
    with (
        calling_arrays_tensors(opened),
        owner.closing(streaming),
        owner.closing(read_ahead(groups, streaming.fill, streaming.may_overlap)) as filled,
    ):
        try:
            for group, _ in filled:
                streaming.make(group)
                for incoming in group.arrays:
                    yield streaming.take(group, incoming)
                    owner.require("a stream of arrays", "call stream() here")
                streaming.finish(group)
        finally:
            if owner.may_close:
                progress.cancel()


def _groups(arrays: Sequence[Incoming], group_bytes: int, on_devices: Collection[int]) -> Iterator[_Group]:
    group = _Group([], 0, is_large=False)
    for incoming in arrays:
        nbytes = _nbytes(incoming)
        host_bytes, device_bytes = (0, nbytes) if incoming.leaf in on_devices else (nbytes, 0)
        is_full = (
            group.nbytes + host_bytes > group_bytes or group.device_bytes + device_bytes > _DEVICE_GROUP_BYTES
        )
        if group.arrays and is_full:
            yield group
            group = _Group([], 0, is_large=False)
        group.arrays.append(incoming)
        group.nbytes += host_bytes
        group.device_bytes += device_bytes
        group.is_large = group.nbytes > group_bytes
    if group.arrays:
        yield group


def _nbytes(incoming: Incoming) -> int:
    return sum(aligned(size) for size in incoming.box_bytes())


class _Bringing:
    """Arrays on their way to devices in one job, each to be had as soon as it is there, whatever is still to
    come. All but `wait` are called by one thread.

    Args:
        opened: What they are read of.
        reading: How.
        codec: What makes them.
        arrays: They; none is cast.
    """

    def __init__(
        self, opened: OpenedTensors, reading: Reading, codec: Codec, arrays: Sequence[Incoming]
    ) -> None:
        self._opened = opened
        self._arrays = arrays
        self._made, requests, destinations = devices.make(codec, arrays, reading.options)
        reading.check_cancelled()
        self._arriving = opened.start_to_devices(
            requests, destinations, reading.options, reading.progress.add, reading.statistics
        )

    def take(self, place: int) -> Any:
        """One of the arrays, by its place among them, once all of it is on its devices."""
        number = self._arrays[place].array
        assert number is not None, "no scalar goes to devices"
        self._arriving.wait_for(self._opened.tensors_of(number))
        return self._made.take(place)

    def wait(self) -> None:
        """Returns once nothing of it is read any more, however that ended."""
        self._arriving.wait()

    def finish(self) -> None:
        """Ends it, once all arrays have been taken."""
        self._arriving.finish()

    def close(self) -> None:
        """Ends it at any time; no memory is written to afterwards."""
        self._arriving.close()


class _Streaming:
    """Reads groups, and makes arrays of them.

    Attributes:
        on_devices: The arrays that the engine brings to devices itself.
    """

    def __init__(self, opened: OpenedTensors, codec: Codec, filling: Filling, made: Made) -> None:
        self._opened = opened
        self._codec = codec
        self._made = made
        self._reading = filling.reading
        self._group_bytes = filling.group_bytes
        self._staged = {incoming.leaf for _, incoming in filling.staged}
        self.on_devices = {incoming.leaf for _, batch in filling.on_devices for incoming in batch}
        self._under_way: _Bringing | None = None

    def fill(self, group: _Group) -> None:
        """Reads a group. What is large and does not stay in host memory is left to `make`; what goes to
        devices is under way then."""
        resident, staged, on_devices = self._divided(group)
        fill_buffers(self._reading, resident)
        if staged and not group.is_large:
            fill_buffers(self._reading, staged, Region(min(group.nbytes, self._group_bytes)).allocate)
        plain = [incoming for incoming in on_devices if incoming.is_plain]
        cast = [incoming for incoming in on_devices if not incoming.is_plain]
        if on_devices and self._under_way is not None:
            self._under_way.wait()  # two jobs would only take turns
        group.brought = list(devices.load(self._reading, self._codec, cast))
        if plain:
            group.bringing = self._under_way = _Bringing(self._opened, self._reading, self._codec, plain)
            group.places = {incoming.leaf: place for place, incoming in enumerate(plain)}

    def may_overlap(self, group: _Group, following: _Group) -> bool:
        """Whether a group may be read while the one before is handed out."""
        first = group.arrays[0]
        held_bytes = group.nbytes
        if first.leaf not in self._staged and first.leaf not in self.on_devices:  # it is the caller's at once
            held_bytes -= _nbytes(first)
        return held_bytes + following.nbytes <= _GROUPS * self._group_bytes

    def make(self, group: _Group) -> None:
        """Makes the arrays of a group, and lets go of what they do not keep."""
        resident, staged, _ = self._divided(group)
        self._made.make(self._codec, resident, wait=False)
        if group.is_large:
            staging.load_staged(
                self._reading, [(self._codec, incoming) for incoming in staged], self._group_bytes, self._made
            )
        else:
            self._made.make(self._codec, staged, wait=True)
        for arrays, leaves in group.brought:
            self._made.keep([incoming.leaf for incoming in arrays], leaves)
        group.brought = []
        for incoming in group.arrays:
            incoming.buffers = []

    def take(self, group: _Group, incoming: Incoming) -> Any:
        """An array of a group that was made, once it is on its devices; nothing is kept of it here."""
        place = group.places.get(incoming.leaf)
        if place is None:
            return self._made.take(incoming.leaf)
        assert group.bringing is not None
        return group.bringing.take(place)

    def finish(self, group: _Group) -> None:
        """Ends what brought the arrays of a group to devices."""
        if group.bringing is not None:
            group.bringing.finish()

    def close(self) -> None:
        """Ends what is under way to devices."""
        if self._under_way is not None:
            self._under_way.close()

    def _divided(self, group: _Group) -> tuple[list[Incoming], list[Incoming], list[Incoming]]:
        """Those that stay in host memory, those that do not, and those that never get there as a whole."""
        parts: tuple[list[Incoming], list[Incoming], list[Incoming]] = ([], [], [])
        for incoming in group.arrays:
            part = 1 if incoming.leaf in self._staged else 2 if incoming.leaf in self.on_devices else 0
            parts[part].append(incoming)
        return parts
