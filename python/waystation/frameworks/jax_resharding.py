"""JAX arrays that several processes read with one sharding, and then reshard to the one that is wanted.

A file holds rows one after another. Where a process would need short parts of all rows, it reads whole rows
instead, as many as any other, and the devices exchange the parts: every byte is read by one process.
Invariants: what is decided follows from shapes and shardings alone, so that all processes decide the same;
elements travel as integers, so that no value is changed on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from waystation._errors import Unavailable
from waystation.frameworks.base import Target
from waystation.frameworks.jax_broadcast import in_scope
from waystation.frameworks.jax_shardings import spread_of
from waystation.grid import Box, volume

_WORDS: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def processes_of(place: object) -> set[int]:
    """The processes whose devices a sharding is over, of None all; none of what has no devices."""
    if place is None:
        return set(range(jax.process_count()))
    if not isinstance(place, Sharding) or isinstance(getattr(place, "mesh", None), AbstractMesh):
        return set()
    devices: Any = place.device_set  # which JAX has not typed
    return {device.process_index for device in devices}


def described(place: object, shape: tuple[int, ...]) -> str:
    """What is equal for two shardings only if each device has the same part of an array of this shape.

    The text of a sharding has the axes of its mesh, and not its devices.
    """
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        order = place.mesh.device_ids.ravel().tolist()
    elif isinstance(place, Sharding):
        parts: dict[Any, Any] = dict(place.devices_indices_map(shape))
        order = sorted((device.id, repr(part)) for device, part in parts.items())
    else:
        order = []
    return f"{place!r} {order}"


def reading(target: Target, item_bytes: int, least_bytes: int) -> tuple[tuple[int, ...], Sharding] | None:
    """The shape and the sharding with which an array is read first; None if it is read as it should be.

    Args:
        target: Where it should go.
        item_bytes: Of an element in the file.
        least_bytes: What a process reads of the file without a gap, at least.
    """
    sharding, shape = target.placement.sharding, tuple(target.shape)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable or math.prod(shape) == 0:
        return None
    if target.placement.layout is not None or not _is_narrow(sharding, shape, least_bytes // item_bytes):
        return None
    count = sharding.mesh.devices.size
    axis = next((axis for axis, extent in enumerate(shape) if extent >= count), 0)
    padded = -(-shape[axis] // count) * count
    return (*shape[:axis], padded, *shape[axis + 1 :]), _split_evenly(sharding.mesh, axis)


@lru_cache(maxsize=1024)
def _is_narrow(sharding: Sharding, shape: tuple[int, ...], least_items: int) -> bool:
    """Whether a process needs parts of the array that are shorter than that, with others between."""
    own: dict[int, list[Box]] = {}
    spread = spread_of(sharding, shape)
    for box, holders in zip(spread.boxes, spread.holders, strict=True):
        for process in holders:
            own.setdefault(process, []).append(box)
    return any(_stretch(_around(boxes), shape) < least_items for boxes in own.values())


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds some others."""
    begins = np.array([box[0] for box in boxes])
    ends = begins + np.array([box[1] for box in boxes])
    begin = begins.min(axis=0)
    return tuple(begin.tolist()), tuple((ends.max(axis=0) - begin).tolist())


def _stretch(box: Box, shape: tuple[int, ...]) -> float:
    """The elements of a box that follow one another in the array; infinite if all do."""
    items = 1
    for extent, whole in zip(reversed(box[1]), reversed(shape), strict=True):
        items *= extent
        if extent != whole:
            break
    return math.inf if items == volume(box) else items


@lru_cache(maxsize=256)
def _split_evenly(mesh: Mesh, axis: int) -> NamedSharding:
    """Equal parts of an axis for all devices of a mesh, in their order there."""
    return NamedSharding(Mesh(mesh.devices.reshape(-1), ("part",)), PartitionSpec(*[None] * axis, "part"))


def resharded(array: Any, target: Target) -> jax.Array:
    """An array that was read so, with the sharding that is wanted. All processes of its devices call it, for
    the same arrays in the same order.

    Raises:
        Unavailable: JAX could not do it.
    """
    sharding: NamedSharding = target.placement.sharding
    # Axes may be such that JAX leaves no choice to a program; here it has to find the way.
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    free = NamedSharding(mesh, sharding.spec)
    try:
        with in_scope(mesh):
            made = _program(tuple(target.shape), free)(array)
            made.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        raise Unavailable(
            f"JAX could not divide an array of shape {tuple(target.shape)} among the devices as {sharding}: "
            f"{error}; give together=False to have every process read for itself"
        ) from error
    parts = [shard.data for shard in made.addressable_shards]
    return jax.make_array_from_single_device_arrays(made.shape, sharding, parts)


@lru_cache(maxsize=256)
def _program(shape: tuple[int, ...], sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    def divide(array: jax.Array) -> jax.Array:
        dtype = array.dtype
        word = _WORDS.get(dtype.itemsize) if jnp.issubdtype(dtype, jnp.floating) else None
        words = array if word is None else jax.lax.bitcast_convert_type(array, word)
        words = words[tuple(slice(extent) for extent in shape)]
        words = jax.lax.with_sharding_constraint(words, sharding)
        return words if word is None else jax.lax.bitcast_convert_type(words, dtype)

    program: Callable[[jax.Array], jax.Array] = jax.jit(divide, out_shardings=sharding)
    return program
