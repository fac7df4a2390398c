"""JAX leaves: the codec, put together from sources, targets and assembly."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from waystation._errors import InvalidInput
from waystation.frameworks import dtypes, jax_broadcast, jax_devices, jax_resharding, jax_sources, jax_targets
from waystation.frameworks.base import (
    ArraySource,
    Broadcasting,
    Codec,
    Contiguous,
    OnDevices,
    Resharding,
    StoredArray,
    Target,
)
from waystation.frameworks.jax_devices import PieceWriter, goes_in_pieces, stays_on_host
from waystation.frameworks.jax_dtypes import jax_dtype
from waystation.frameworks.jax_shardings import sharding_from_description
from waystation.frameworks.mesh_in_effect import mesh_in_effect
from waystation.frameworks.sharding_metadata import ShardingMetadata, sharding_metadata
from waystation.frameworks.storage import Storage, StorageMetadata


class SavedShapeDtypeStruct(jax.ShapeDtypeStruct):
    """A `jax.ShapeDtypeStruct` as `metadata` returns it: equal to one that says nothing of a saved array."""

    __slots__ = ("_described", "_storage")

    def __init__(self, abstract: Any, stored: StoredArray, storage: Storage) -> None:
        made: Any = super()  # which JAX has not typed
        made.__init__(abstract.shape, abstract.dtype, sharding=abstract.sharding)
        self._described = stored.sharding
        self._storage = storage

    @property
    def storage_metadata(self) -> StorageMetadata:
        """How the array is stored."""
        return self._storage()

    @property
    def sharding_metadata(self) -> ShardingMetadata | None:
        """How the array was sharded, whether or not its devices are here; None if that is not known."""
        return sharding_metadata(self._described, tuple(self.shape))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy elsewhere is any abstract array: the checkpoint does not come along.
        return functools.partial(jax.ShapeDtypeStruct, sharding=self.sharding), (self.shape, self.dtype)


class JaxCodec(Codec):
    """`jax.Array` and `jax.ShapeDtypeStruct` to blocks and back."""

    name = "jax"
    devices: OnDevices | None = jax_devices
    broadcasting: Broadcasting | None = jax_broadcast
    resharding: Resharding | None = jax_resharding

    def is_leaf(self, value: Any) -> bool:
        """Whether `value` is a JAX array, or stands for one. Tracers are, and are refused by `sources`."""
        return isinstance(value, jax.Array | jax.ShapeDtypeStruct)

    def contiguous(self, leaves: Sequence[Any]) -> Contiguous:
        """Describes arrays that one CPU device holds whole, once their computations are done."""
        return jax_sources.contiguous(leaves)

    def sources(self, leaves: Sequence[Any]) -> list[ArraySource]:
        """Describes arrays once their computations are done; CPU memory is viewed, not copied."""
        return jax_sources.sources(leaves)

    def targets(self, abstracts: Sequence[Any], stored: Sequence[StoredArray]) -> list[Target]:
        """The shards that this process needs by the shardings of the abstract leaves."""
        return jax_targets.targets(abstracts, stored)

    def default_targets(self, stored: Sequence[StoredArray]) -> list[Target]:
        """The shards that this process needs by the shardings at save."""
        return jax_targets.default_targets(stored)

    def place_of(self, place: Any) -> Any:
        """A sharding; None for the default device."""
        return jax_targets.place_of(place)

    def circumstances(self) -> object:
        """What targets depend on besides: the 64-bit mode, the default device, and the mesh in effect."""
        return jax.config.jax_enable_x64, jax.config.jax_default_device, mesh_in_effect()

    def placed(
        self, stored: Sequence[StoredArray], dtypes: Sequence[str], places: Sequence[Any]
    ) -> list[Target]:
        """The shards that this process needs by given shardings."""
        return jax_targets.placed(stored, dtypes, places)

    def assemble(self, targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
        """Makes the arrays; on CPU they alias the buffers."""
        return jax_targets.assemble(targets, boxes)

    def stays_on_host(self, target: Target) -> bool:
        """Whether the array aliases the buffers that it is made of."""
        return stays_on_host(target)

    def open_in_pieces(self, target: Target) -> PieceWriter | None:
        """What puts the array together on its devices; None where it is made of whole boxes only."""
        return PieceWriter(target) if goes_in_pieces(target) else None

    def wait(self, leaves: Sequence[Any]) -> None:
        """Returns once all copies to devices are done."""
        jax.block_until_ready(leaves)

    def sharded(self, stored: StoredArray, sharding: object) -> Any:
        """A `jax.ShapeDtypeStruct` with the given sharding; None for the default device."""
        if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
            raise InvalidInput(
                f"sharding_for returned {sharding!r:.200}; return a jax.sharding.Sharding, or None for the "
                "default device"
            )
        dtypes.of_stored(stored)
        return jax.ShapeDtypeStruct(tuple(stored.shape), jax_dtype(stored.dtype), sharding=sharding)

    def abstract(self, stored: StoredArray) -> Any:
        """A `jax.ShapeDtypeStruct`, sharded as saved where the present devices allow it."""
        dtypes.of_stored(stored)
        shape = tuple(stored.shape)
        sharding = None
        if stored.sharding is not None and stored.sharding.get("committed", True):
            sharding = sharding_from_description(stored.sharding, shape)
        return jax.ShapeDtypeStruct(shape, jax_dtype(stored.dtype), sharding=sharding)

    def shown(self, stored: StoredArray, storage: Storage) -> Any:
        """A `jax.ShapeDtypeStruct` that also says how the array is stored, and was sharded."""
        return SavedShapeDtypeStruct(self.abstract(stored), stored, storage)


CODEC = JaxCodec()
