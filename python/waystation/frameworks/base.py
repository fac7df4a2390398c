"""What a framework tells the layers above about its leaves, and nothing about how it does so.

A *codec* (one per framework) turns leaves into blocks for saving and filled host buffers into
leaves after loading. Batches everywhere: a state may hold tens of thousands of small arrays.
Dtypes are logical names: NumPy's (`float32`), ml_dtypes' (`bfloat16`, `float8_e4m3fn`, `int4`), or
`key<impl>` for PRNG keys, `numpy:<str>` for NumPy dtypes without a name above (`numpy:<U5`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
    owner: Any  # keeps the memory alive
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


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """What several processes need of an array that is to be loaded; arrays of one shape and sharding share
    one. Every process knows all of it.

    Attributes:
        boxes: What several processes need, in an order that is the same in all of them; without boxes that
            have no elements. One may be there more than once, for different processes.
        groups: For each of them the processes that need it, two at least.
    """

    boxes: tuple[Box, ...]
    groups: tuple[Group, ...]

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

    def take(self, number: int) -> Any:
        """An array, once its memory is filled and will not be written any more; that of others may be. It is
        the caller's alone then."""
        ...


class InPlace(Protocol):
    """Of codecs whose arrays can be changed: how these are loaded into."""

    def loaded_into(self, abstracts: Sequence[Any], targets: Sequence[Target]) -> list[Target]:
        """The same targets with the arrays that they are loaded into, as far as the abstract leaves are such.

        Raises:
            InvalidInput: An array cannot be written to; `index` in the error's context names it.
        """
        ...

    def memory_of(self, target: Target) -> NDArray[np.uint8] | None:
        """The memory of that array, if it is the host's and lies as the only box of the target does."""
        ...

    def put_into(self, target: Target, leaf: Any) -> Any:
        """That array, with what `leaf` holds: copied there, unless the leaf was made over its memory."""
        ...


class Codec(Protocol):
    """Leaves of one framework to blocks and back."""

    name: str

    def sources(self, leaves: Sequence[Any]) -> list[ArraySource]:
        """Describes concrete leaves; waits for pending computations; copies device memory to host
        (all started before the first is awaited). Raises Unsupported or InvalidInput with no key
        path; `index` in the error's context names the leaf."""
        ...

    def is_leaf(self, value: Any) -> bool:
        """Whether `value` is a concrete or abstract array of this framework."""
        ...

    def targets(self, abstracts: Sequence[Any], stored: Sequence[StoredArray]) -> list[Target]:
        """Where the arrays go, by the abstract leaves (concrete leaves count as abstract too)."""
        ...

    def default_targets(self, stored: Sequence[StoredArray]) -> list[Target]:
        """Where the arrays go when the caller gave no abstract state: as saved, if that fits the
        present devices, else InvalidInput that says how to give a sharding."""
        ...

    def place_of(self, place: Any) -> Any:
        """What `placed` takes for what a user gives as the place of arrays: a device, its name, a sharding,
        or None for the default. Raises InvalidInput if it is no place of this framework, or not here."""
        ...

    def placed(
        self, stored: Sequence[StoredArray], dtypes: Sequence[str], places: Sequence[Any]
    ) -> list[Target]:
        """Where the arrays go by dtypes and places alone."""
        ...

    def assemble(self, targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
        """Makes the leaves of filled host arrays, in batches, without copying where the framework
        can alias (the arrays stay alive as long as the leaves)."""
        ...

    def abstract(self, stored: StoredArray) -> Any:
        """The abstract leaf of a stored array, valid in an abstract state."""
        ...

    def shown(self, stored: StoredArray, storage: Storage) -> Any:
        """The abstract leaf that `metadata()` shows: its attribute `storage_metadata` says how the array is
        stored."""
        ...
