"""What a framework tells the layers above about its leaves, and nothing about how it does so.

A *codec* (one per framework) turns leaves into blocks for saving and filled host buffers into
leaves after loading. Batches everywhere: a state may hold tens of thousands of small arrays.
Dtypes are logical names: NumPy's (`float32`), ml_dtypes' (`bfloat16`, `float8_e4m3fn`, `int4`), or
`key<impl>` for PRNG keys, `numpy:<str>` for NumPy dtypes without a name above (`numpy:<U5`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation.frameworks.storage import Storage
from waystation.grid import Box, Spread, volume

# Processes that need the same part of an array: first the one that reads it where it is broadcast.
Group: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class Block:
    """A box of an array that this process can read: host memory strided in any way, or contiguous
    device memory.

    `offset`, `shape`, `strides` (bytes) are in *storage* terms, see `ArraySource.storage_shape`.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    owner: object  # keeps the memory alive
    device: int = -1  # CUDA ordinal where the memory is a GPU's, else -1


@dataclass(slots=True)
class StoredArray:
    """What a checkpoint says of one array leaf: also the base of what `metadata()` returns."""

    shape: tuple[int, ...]
    dtype: str  # logical
    framework: str  # "jax" | "torch" | "numpy" | "scalar" (a NumPy scalar) | "python" (a number) | …
    storage_dtype: str  # safetensors dtype name, e.g. "BF16"
    storage_shape: tuple[int, ...]  # a trailing byte axis is appended where safetensors has no dtype
    sharding: dict[str, Any] | None  # JSON description, see `describe_sharding`
    extra: dict[str, Any]  # JSON; adapters' own (requires_grad, …)


@dataclass(slots=True)
class ArraySource(StoredArray):
    """One array leaf that is to be saved, as this process sees it: what will be said of it, and its bytes."""

    sharding: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    storage_item_bytes: int = field(kw_only=True)
    blocks: list[Block] = field(kw_only=True)  # distinct local boxes (replicas removed)
    # Who else holds what, in logical elements, in a program of several processes. None: every process has
    # a value of its own, and the primary's is the one that is saved.
    spread: Spread | None = field(kw_only=True, default=None)
    # It is spread over devices of this process alone: other processes have other arrays in its place.
    only_here: bool = field(kw_only=True, default=False)
    # The user can change the memory in place: a snapshot must copy it.
    mutable: bool = field(kw_only=True)


@dataclass(slots=True)
class Contiguous:
    """Leaves that lie in host memory in one piece, in C order: of each what these columns have at its place.

    States have thousands of small arrays of few kinds, so each kind is described once.

    Attributes:
        kinds: Descriptions, each of many leaves, without blocks; None where none is used.
        which: The kind of each leaf; -1 for one that is none of these, and is described by `Codec.sources`.
        addresses: Where each begins.
        owners: What keeps its memory alive.
    """

    kinds: Sequence[ArraySource | None]
    which: NDArray[np.int64]
    addresses: NDArray[np.int64]
    owners: Sequence[object]


@dataclass(slots=True)
class Target:
    """Where one array leaf is to be loaded to: the boxes of it that this process needs.

    `boxes` are distinct `(offset, shape)` in logical elements. The loader hands back one C-contiguous
    `numpy.ndarray` per box, of `dtype`, 256-byte aligned, to `Codec.assemble`; where `into` names an array of
    the caller, one box can be that array's memory, aligned as that is.
    """

    shape: tuple[int, ...]
    dtype: str  # logical, after any cast
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    placement: Any  # the codec's own: sharding, device, which box goes where, …
    into: Any = None  # the array of the caller that is to hold it, see `InPlace`


@dataclass(frozen=True, eq=False)
class Replicas:
    """Who reads what for whom: the boxes of an array that several processes need. Every process knows all of
    it; arrays of one shape and sharding share one.

    Attributes:
        boxes: What several processes need, in an order that is the same in all of them; without boxes that
            have no elements. One may be there more than once, for different processes.
        groups: For each of them the processes that need it, two at least.
    """

    boxes: tuple[Box, ...]
    groups: tuple[Group, ...]

    @functools.cached_property
    def items(self) -> dict[Group, int]:
        """For each group the elements that its processes share."""
        found: dict[Group, int] = {}
        for box, group in zip(self.boxes, self.groups, strict=True):
            found[group] = found.get(group, 0) + volume(box)
        return found

    @functools.cached_property
    def needed_items(self) -> int:
        """The elements that the processes need of what they share, all of them together."""
        return sum(len(group) * items for group, items in self.items.items())

    @functools.cached_property
    def received_items(self) -> int:
        """Those of them that they would not read if they were broadcast."""
        return self.needed_items - sum(self.items.values())

    @functools.cached_property
    def digest(self) -> str:
        """What tells these from others."""
        return hashlib.sha256(repr((self.boxes, self.groups)).encode()).hexdigest()

    @classmethod
    def of(cls, spread: Spread) -> Replicas | None:
        """What a spread has of that, the first holder reading; None if it is nothing."""
        return cls.made_of(list(zip(spread.boxes, spread.holders, strict=True)))

    @classmethod
    def made_of(cls, found: Sequence[tuple[Box, Group]]) -> Replicas | None:
        """Those of the given boxes that belong here; None if it is none of them."""
        kept = [(box, group) for box, group in found if len(group) > 1 and volume(box)]
        if not kept:
            return None
        return cls(tuple([box for box, _ in kept]), tuple([group for _, group in kept]))


class Broadcaster(Protocol):
    """Carries bytes from one process of a group to the others of it, by collectives of its framework.

    Attributes:
        process_index: This process, as the groups name it.
    """

    process_index: int

    def broadcast(self, layer: Sequence[Group], nbytes: int, piece: NDArray[np.uint8]) -> None:
        """Carries one piece in each group of a layer. All processes of the layer call it, and all calls that
        two processes have in common come in the same order in both.

        Args:
            layer: Groups of equally many processes, no process in two of them, this one in one.
            nbytes: No piece of any of the groups is longer. Few values ever come.
            piece: What the first process of this one's group sends, contiguous; the others have it filled.
                In one group it is equally long everywhere.

        Raises:
            Unavailable: The framework could not do it.
        """
        ...


class DeviceArrays(Protocol):
    """Arrays in the making, whose memory on their devices somebody else fills.

    Attributes:
        regions: That memory: CUDA ordinals, addresses and bytes. Whatever used it before is done with it.
        places: For each array the numbers of boxes of its target, and the addresses where they go; a box that
            several devices need is there several times.
    """

    regions: list[tuple[int, int, int]]
    places: list[list[tuple[int, int]]]

    def take(self, number: int) -> object:
        """An array, once its memory is filled and will not be written any more; that of others may be. It is
        the caller's alone then."""
        ...


@dataclass(frozen=True, slots=True)
class CastRule:
    """Whether casts may lose values.

    Attributes:
        may_lose: Convert what the new dtype lacks, too: floats are truncated to integers and kept within
            their range, NaN becomes 0, integers wrap, floats that overflow become infinity (NaN, or the
            largest value, where there is none), and of complex numbers the real part stays.
        option: What a user sets to allow that, for messages.
    """

    may_lose: bool
    option: str


# ---- what only some codecs can do --------------------------------------------------------------


class InPlace(Protocol):
    """Loads into arrays of the caller, where arrays can be changed."""

    def loaded_into(self, abstracts: Sequence[object], targets: Sequence[Target]) -> list[Target]:
        """The same targets with the arrays that they are loaded into, as far as the abstract leaves are such.

        Raises:
            InvalidInput: An array cannot be written to; `index` in the error's context names it.
        """
        ...

    def may_write(self, array: object) -> bool:
        """Whether one of the arrays that `Codec.contiguous` describes can be written to."""
        ...

    def wrote(self, owners: Sequence[object]) -> None:
        """Somebody has written to all of the arrays that such owners keep."""
        ...

    def memory_of(self, target: Target) -> NDArray[np.uint8] | None:
        """The memory of that array, if it is the host's and lies as the only box of the target does."""
        ...

    def span_of(self, target: Target) -> tuple[int, int] | None:
        """Where the memory of that array begins and ends, if it is in one piece, in whatever order its
        elements lie there, and has an address of its own among all memory of the process."""
        ...

    def put_into(self, target: Target, leaf: object) -> object:
        """That array, with what `leaf` holds: copied there, unless the leaf was made over its memory."""
        ...


class OnDevices(Protocol):
    """Makes arrays whose memory on devices the engine fills."""

    def goes_to_devices(self, target: Target, stored_dtype: str) -> bool:
        """Whether the engine can bring an array to its devices itself."""
        ...

    def on_devices(
        self, targets: Sequence[Target], stored_dtypes: Sequence[str], rule: CastRule
    ) -> DeviceArrays:
        """The arrays there, to be filled, in the dtypes that they are stored in."""
        ...


class OverMemory(Protocol):
    """Makes arrays over host memory that is still written to."""

    def is_made_over_memory(self, target: Target) -> bool:
        """Whether an array can be made so."""
        ...

    def arrays_over(
        self, targets: Sequence[Target], slabs: Sequence[_native.Slab | None], offsets: Sequence[int]
    ) -> Sequence[object]:
        """Arrays over parts of slabs, which they keep. Equal targets are mostly one object."""
        ...


class Broadcasting(Protocol):
    """Lets one process read what several need."""

    def replicas(
        self, targets: Sequence[Target], axis: str | int | None, first: int
    ) -> list[Replicas | None]:
        """What several processes need of each array.

        Args:
            targets: The arrays.
            axis: The axis of their mesh along which they share; None for all axes.
            first: The place along that axis of the devices whose processes read.
        """
        ...

    def broadcaster(self, targets: Sequence[Target]) -> Broadcaster:
        """What carries that from one of them to the others."""
        ...


class Resharding(Protocol):
    """Reads arrays with a sharding that is contiguous in files, and then reshards them."""

    def processes_of(self, place: object) -> set[int]:
        """The processes whose devices a place of arrays is over; None stands for all devices."""
        ...

    def described(self, place: object, shape: tuple[int, ...]) -> str:
        """What is equal for two places only if they divide an array of this shape in the same way."""
        ...

    def reading(
        self, target: Target, item_bytes: int, least_bytes: int
    ) -> tuple[tuple[int, ...], object] | None:
        """With which shape and at which place an array is read first, whose processes need parts of it that
        are shorter than `least_bytes` in the file; None for others."""
        ...

    def resharded(self, array: object, target: Target) -> object:
        """Such an array with the sharding that is wanted."""
        ...


class PieceWriter(Protocol):
    """Puts one array together on its devices."""

    def put(self, box_number: int, offset: tuple[int, ...], values: NDArray[Any]) -> None:
        """Places a part of a box of the target, `offset` counted from the box; returns once the host
        memory of `values` is no longer needed."""
        ...

    def finish(self) -> object:
        """The array, once all of it has been put."""
        ...


# ---- what every codec can do -------------------------------------------------------------------


class Codec(Protocol):
    """Leaves of one framework to blocks and back. Implementations derive from it.

    Leaves, abstract leaves and places are the framework's own: nobody else looks into them.

    Attributes:
        name: Of the framework.
        in_place: How arrays are loaded into; None if arrays cannot be changed.
        devices: How the engine brings arrays to devices; None if it cannot.
        over_memory: How arrays are made before their memory is filled; None if they cannot be.
        broadcasting: How processes read for each other; None if no two processes hold the same array.
        resharding: How arrays are read with one sharding and resharded; None likewise.
        sharded: The abstract leaf of a stored array with the sharding that a user's function chose; None if
            the framework has no shardings. Raises InvalidInput if it is no sharding.
        circumstances: What targets depend on besides what they are made of: settings of the calling thread.
            None if there is nothing.
    """

    name: str
    in_place: InPlace | None = None
    devices: OnDevices | None = None
    over_memory: OverMemory | None = None
    broadcasting: Broadcasting | None = None
    resharding: Resharding | None = None
    sharded: Callable[[StoredArray, object], object] | None = None
    circumstances: Callable[[], object] | None = None

    def contiguous(self, leaves: Sequence[object]) -> Contiguous | None:
        """Describes those concrete leaves that lie in host memory in one piece, as `sources` does. What is
        anything special is left to that; None leaves all to it."""
        return None

    def sources(self, leaves: Sequence[object]) -> list[ArraySource]:
        """Describes concrete leaves; waits for pending computations; copies device memory to host
        (all started before the first is awaited). Raises Unsupported or InvalidInput with no key
        path; `index` in the error's context names the leaf."""
        ...

    def is_leaf(self, value: object) -> bool:
        """Whether `value` is a concrete or abstract array of this framework."""
        ...

    def targets(self, abstracts: Sequence[object], stored: Sequence[StoredArray]) -> list[Target]:
        """Where the arrays go, by the abstract leaves (concrete leaves count as abstract too)."""
        ...

    def default_targets(self, stored: Sequence[StoredArray]) -> list[Target]:
        """Where the arrays go when the caller gave no abstract state: as saved, if that fits the
        present devices, else InvalidInput that says how to give a sharding."""
        ...

    def place_of(self, place: object) -> object:
        """What `placed` takes for what a user gives as the place of arrays: a device, its name, a sharding,
        or None for the default. Raises InvalidInput if it is no place of this framework, or not here."""
        ...

    def placed(
        self, stored: Sequence[StoredArray], dtypes: Sequence[str], places: Sequence[object]
    ) -> list[Target]:
        """Where the arrays go by dtypes and places alone."""
        ...

    def assemble(self, targets: Sequence[Target], boxes: Sequence[list[NDArray[Any]]]) -> list[object]:
        """Makes the leaves of filled host arrays, in batches, without copying where the framework
        can alias (the arrays stay alive as long as the leaves)."""
        ...

    def abstract(self, stored: StoredArray) -> object:
        """The abstract leaf of a stored array, valid in an abstract state."""
        ...

    def shown(self, stored: StoredArray, storage: Storage) -> object:
        """The abstract leaf that `metadata()` shows: its attribute `storage_metadata` says how the array is
        stored."""
        ...

    # Where a codec has nothing to say of these, its arrays live in the memory that they are read to.

    def stays_on_host(self, target: Target) -> bool:
        """Whether what is made of filled buffers keeps living in them."""
        return True

    def open_in_pieces(self, target: Target) -> PieceWriter | None:
        """What puts an array together on its devices; None where it is made of whole boxes only."""
        return None

    def wait(self, leaves: Sequence[object]) -> None:
        """Returns once leaves no longer need the buffers that they were made of."""
        return
