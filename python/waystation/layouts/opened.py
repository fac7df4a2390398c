"""What every layout gives a load: a state that has been opened, and what is read of it.

This is the protocol alone; `layouts.native`, `layouts.orbax` and `safetensors` implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._options import Options
from waystation.frameworks.base import StoredArray
from waystation.frameworks.storage import StorageMetadata
from waystation.grid import Box
from waystation.tree import Structure

# ---- what is stored ----------------------------------------------------------------------------

Scalar: TypeAlias = bool | int | float | complex | str | bytes


@dataclass(slots=True)
class ArrayLeaf:
    """A leaf that is an array: its number in the chunk table."""

    array: int


Leaf: TypeAlias = ArrayLeaf | Scalar


@dataclass(slots=True)
class StoredTree:
    """The structure of a stored state, and what is known of its leaves.

    Attributes:
        structure: Shape of the tree.
        leaves: One per leaf of the structure: an `ArrayLeaf` or a scalar's value.
        arrays: What is known of each array, by number.
        labels: The tensor name of each array.
    """

    structure: Structure
    leaves: list[Leaf]
    arrays: Sequence[StoredArray]
    labels: list[str]

    def comparable(self, structure: Structure) -> Structure:
        """What of a structure has to agree with the stored one, of which the same is taken: all of it."""
        return structure


# ---- what is read, and where to ----------------------------------------------------------------


@dataclass(slots=True)
class Request:
    """Boxes of one array, in logical elements, to be read as stored (no cast).

    Attributes:
        array: Its number.
        boxes: They.
        missing: For each the parts of it that are to be read, in terms of the storage of the array, which do
            not overlap; None for all of it.
    """

    array: int
    boxes: list[Box]
    missing: Sequence[Sequence[Box]] | None = None


# The memory that a buffer is in, None where it has no bytes; and where in that.
Place: TypeAlias = tuple[_native.Slab | NDArray[Any] | None, int]
Slabs: TypeAlias = list[tuple[_native.Slab | None, int]]
# Gives memory for buffers of so many bytes: places, and their addresses.
Allocate: TypeAlias = Callable[[Sequence[int]], tuple[Sequence[Place], NDArray[np.int64]]]
# Makes something of each array over its memory: a slab (None where it has no elements) and where in that.
Over: TypeAlias = Callable[[Sequence[Any], Sequence[int]], Sequence[object]]

Region: TypeAlias = tuple[int, int, int]
"""Memory of a device: its CUDA ordinal, the address, the bytes."""


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where boxes go.

    Attributes:
        addresses: Of each box, in the order of the requests; there it is contiguous.
        owner: What keeps the memory alive.
        regions: The memory of devices; what lies in none of them is the host's.
    """

    addresses: NDArray[np.int64]
    owner: object
    regions: Sequence[Region] = ()


@dataclass(slots=True)
class ReadStatistics:
    """What the reads of one load have moved so far.

    Attributes:
        bytes_needed: Bytes of arrays that were asked for, as they are stored.
        bytes_read: Bytes that were read for that: of whole blocks where they are verified, and of headers.
        modes: The ways in which files were read.
        first_touch_s: Processor time of all threads that the first touch of the memory of arrays took.
        cached_bytes: Bytes that came from a cache of this machine.
        repeated_requests: Requests to a store that were sent a second time.
        gpu_direct_bytes: Bytes of those that were read straight to GPUs.
        gpu_direct_reasons: Why others were not, where that was wanted.
        headers: The files whose header has been read, and so verified.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    modes: set[str] = field(default_factory=set)
    first_touch_s: float = 0.0
    cached_bytes: int = 0
    repeated_requests: int = 0
    gpu_direct_bytes: int = 0
    gpu_direct_reasons: set[str] = field(default_factory=set)
    headers: set[int] = field(default_factory=set)


class Job(Protocol):
    """A part of an operation that runs by itself: a job of the engine, or calls of handlers."""

    def progress(self) -> tuple[int, int]:
        """`(done, total)` bytes."""
        ...

    def cancel(self) -> None:
        """Asks it to stop."""
        ...


# ---- the protocol ------------------------------------------------------------------------------


class Mapped(Protocol):
    """Arrays that alias files instead of being read."""

    def array(self, request: Request) -> NDArray[Any] | None:
        """The requested array over its file, None where it has to be read."""
        ...


class ReadToDevices(Protocol):
    """Reads every requested box, as it is stored, to given memory, that of devices above all; whatever used
    that before must have been waited for."""

    def __call__(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
    ) -> None:
        """Returns once all of it is there."""
        ...


class ReadOver(Protocol):
    """Reads whole arrays, given by number, as they are stored, and boxes of others in the same job."""

    def __call__(
        self,
        arrays: Sequence[int],
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        over: Over,
        requests: Sequence[Request] = (),
        allocate: Allocate = ...,
    ) -> tuple[Sequence[object], list[list[NDArray[Any]]]]:
        """Returns, once all of it is there, what `over` has made over the memory of the arrays meanwhile, and
        the boxes, as `Opened.read_boxes` does. `allocate` gives the memory of both, in that order."""
        ...


class Opened(Protocol):
    """A state whose metadata have been read and checked."""

    @property
    def directory(self) -> str:
        """Where its files are."""
        ...

    @property
    def notices_absence(self) -> bool:
        """Whether a read fails where a file is missing that belongs to it; else it may stand for a value."""
        ...

    @property
    def tree(self) -> StoredTree:
        """Its structure, its leaves and what is known of its arrays."""
        ...

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How one of its arrays is cut."""
        ...

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        allocate: Allocate,
    ) -> list[list[NDArray[Any]]]:
        """Reads every requested box, as it is stored, into memory of its own.

        Args:
            requests: What is to be read.
            options: How.
            on_job: Told of every job.
            statistics: Where what was read is added.
            allocate: Gives the memory.

        Returns:
            For each request an array per box, C-contiguous, of the stored dtype (dtypes without a NumPy equal
            keep their storage form, with the trailing axis).
        """
        ...

    @property
    def read_to_devices(self) -> ReadToDevices | None:
        """How the engine brings boxes to devices; None where it cannot."""
        ...

    @property
    def mapped(self) -> Callable[[], Mapped] | None:
        """Gives arrays over mappings, for one load; None where files cannot be mapped."""
        ...

    @property
    def read_over(self) -> ReadOver | None:
        """How arrays are made before their memory is filled; None where they cannot be."""
        ...
