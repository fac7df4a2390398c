"""What is known of checkpoints and their items without reading arrays."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import SimpleNamespace
from typing import Any

import numpy as np

from waystation.frameworks import jax_version0 as jax
from waystation.frameworks.sharding_metadata import (
    NamedShardingMetadata,
    ShardingMetadata,
    SingleDeviceShardingMetadata,
)
from waystation.training.step_records import read as read_record

__all__ = [
    "ArrayMetadata",
    "Metadata",
    "NamedShardingMetadata",
    "RootMetadata",
    "ScalarMetadata",
    "ShardingMetadata",
    "SingleDeviceShardingMetadata",
    "StepMetadata",
    "StorageMetadata",
    "StringMetadata",
    "TreeMetadata",
    "get_step_metadata",
]


@dataclasses.dataclass(frozen=True)
class StorageMetadata:
    """How an array is stored.

    Attributes:
        chunk_shape: The shape of a chunk.
        write_shape: The shape of what is written at once.
    """

    chunk_shape: tuple[int, ...] | None
    write_shape: tuple[int, ...] | None = None


@dataclasses.dataclass
class Metadata:
    """What is known of a leaf.

    Attributes:
        name: Its name in the tree, with dots.
        directory: Where the tree is.
    """

    name: str
    directory: Any


@dataclasses.dataclass
class ArrayMetadata(Metadata):
    """What is known of an array.

    Attributes:
        shape: Its shape.
        sharding: How it was sharded; None for one of NumPy.
        dtype: Its dtype.
        storage: How it is stored.
    """

    shape: tuple[int, ...]
    sharding: Any
    dtype: Any
    storage: StorageMetadata | None = None


@dataclasses.dataclass
class ScalarMetadata(ArrayMetadata):
    """What is known of a number.

    Attributes:
        shape: `()`.
        sharding: None.
        dtype: Its dtype.
        storage: None.
    """

    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: StorageMetadata | None = None


@dataclasses.dataclass
class StringMetadata(Metadata):
    """What is known of a string."""


class TreeMetadata(Mapping[str, Any]):
    """What is known of a tree: the tree with metadata in the place of leaves, of which it is a mapping, too.
    JAX takes it for a node with the tree as its child.

    Attributes:
        tree: The tree.
        custom_metadata: What was given to the save.
        use_zarr3: Whether arrays are in zarr of version 3.
    """

    def __init__(self, tree: Any, custom_metadata: Any = None, use_zarr3: bool = False) -> None:
        self.tree = tree
        self.custom_metadata = custom_metadata
        self.use_zarr3 = use_zarr3

    def __repr__(self) -> str:
        return (
            f"TreeMetadata(tree={self.tree!r}, custom_metadata={self.custom_metadata!r}, "
            f"use_zarr3={self.use_zarr3})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeMetadata) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __contains__(self, key: object) -> bool:
        return key in self.tree

    def get(self, key: str, default: Any = None) -> Any:
        """What is at a key of the tree, or something else if there is nothing."""
        return self.tree.get(key, default)

    def keys(self) -> KeysView[str]:
        """The keys of the tree."""
        found: KeysView[str] = self.tree.keys()
        return found

    def values(self) -> ValuesView[Any]:
        """What is at them."""
        found: ValuesView[Any] = self.tree.values()
        return found

    def items(self) -> ItemsView[str, Any]:
        """Both."""
        found: ItemsView[str, Any] = self.tree.items()
        return found


jax.register_mapping(
    TreeMetadata,
    lambda value: (value.tree, (_Static(value.custom_metadata), value.use_zarr3)),
    lambda tree, rest: TreeMetadata(tree, rest[0].value, rest[1]),
)


class _Static:
    """JSON values in the structure of a tree, which JAX compares and hashes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclasses.dataclass
class StepMetadata:
    """What is known of a checkpoint.

    Attributes:
        item_handlers: The names of the classes of handlers that have saved its items; of a checkpoint with
            one item that has no name, one such name.
        item_metadata: What is known of its items, by name, or of that one.
        metrics: Those of the step that the checkpoint itself has.
        performance_metrics: Nothing is measured here; an object whose attributes are None.
        init_timestamp_nsecs: When its save began, nanoseconds since 1970.
        commit_timestamp_nsecs: When it was committed.
        custom_metadata: What was given to the save.
    """

    item_handlers: dict[str, str] | str | None = None
    item_metadata: Any = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    performance_metrics: Any = dataclasses.field(default_factory=SimpleNamespace)
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class RootMetadata:
    """What is known of a sequence of checkpoints.

    Attributes:
        internal_metadata: Empty.
        custom_metadata: What was given to the first manager.
    """

    internal_metadata: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    custom_metadata: dict[str, Any] | None = dataclasses.field(default_factory=dict)


def get_step_metadata(path: str | os.PathLike[str]) -> StepMetadata:
    """What a checkpoint says of itself, without its items.

    Raises:
        FileNotFoundError: There is none.
    """
    from waystation import storage

    record = read_record(storage.as_path(storage.located(path)))
    return StepMetadata(
        init_timestamp_nsecs=record.init_ns,
        commit_timestamp_nsecs=record.commit_ns,
        custom_metadata=record.custom_metadata or {},
    )


def dtype_of(value: Any) -> Any:
    """The dtype under which a number is stored."""
    return np.asarray(value).dtype
