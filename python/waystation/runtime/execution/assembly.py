"""Shards out of pieces: what copies and transfers bring to the devices of a host.

Pieces that are on a device are cut, moved and joined there, without waiting for what computes them. Those
that come from other hosts are waited for when the array is first used.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from waystation.frameworks.dtypes import numpy_dtype
from waystation.frameworks.jax_public import Device
from waystation.grid import Box, Shape, relative_to, slices_of_box
from waystation.runtime.execution.buffers import assembled
from waystation.runtime.ir import Sharding, Value

Block = np.ndarray[Any, np.dtype[Any]]
Piece = jax.Array | Callable[[], Block]


def named_sharding(sharding: Sharding, devices: tuple[Device, ...]) -> jax.sharding.NamedSharding:
    """A sharding over devices of JAX, equal to that of what functions are compiled for."""
    sizes = tuple(size for _, size in sharding.axes)
    names = tuple(name for name, _ in sharding.axes)
    parts = [part[0] if len(part) == 1 else (part or None) for part in sharding.spec]
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(sizes), names, auto)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts))


class Lying:
    """How one value lies on the devices of a slice, and which of them are here.

    Args:
        value: The value.
        devices: The devices of its slice, in order; those of other hosts too.
        local: The place in the slice of each device of this host, by its number on the host.
    """

    def __init__(self, value: Value, devices: tuple[Device, ...], local: dict[int, int]) -> None:
        self.value = value
        self.sharding: jax.sharding.NamedSharding = named_sharding(value.sharding, devices)
        self.dtype: np.dtype[Any] | None = numpy_dtype(value.dtype)
        self.shard_shape: Shape = value.sharding.shard_shape(value.shape)
        self.devices: dict[int, Device] = {index: devices[place] for index, place in local.items()}
        self._places = local

    def box(self, index: int) -> Box:
        """The shard of one device of this host."""
        return self.value.sharding.box(self._places[index], self.shard_shape)

    def shard(self, array: jax.Array, index: int) -> jax.Array:
        """The shard of an array of this kind on one device of this host."""
        device = self.devices[index]
        found: jax.Array = next(shard.data for shard in array.addressable_shards if shard.device == device)
        return found

    def zeros(self) -> jax.Array:
        """An array of zeros, which stands for one that could not be made."""
        block = np.zeros(self.shard_shape, self.dtype)
        return self.of_shards([block.copy() for _ in self.devices])

    def of_shards(self, shards: list[Any]) -> jax.Array:
        """An array of one shard for each device of this host, in the order of their numbers."""
        pairs = zip(shards, self.devices.values(), strict=True)
        placed = [jax.device_put(shard, device) for shard, device in pairs]
        return assembled(self.value.shape, self.sharding, placed)

    def of_whole(self, array: Block) -> jax.Array:
        """An array of the shards of one that is here whole."""
        shards = [np.array(array[slices_of_box(self.box(index))]) for index in self.devices]
        return self.of_shards(shards)


class Assembly:
    """An array in the making.

    Args:
        lying: How it is to lie.
    """

    def __init__(self, lying: Lying) -> None:
        self._lying = lying
        self._pieces: defaultdict[int, list[tuple[Box, Piece]]] = defaultdict(list)

    def add(self, index: int, box: Box, piece: Piece) -> None:
        """Takes a piece for the shard of one device; `box` counts within the whole array."""
        self._pieces[index].append((box, piece))

    def finish(self) -> jax.Array:
        """The array.

        Raises:
            WaystationError: A piece did not come.
        """
        blocks: dict[int, Block] = {}  # of one transfer, which may be for several devices
        shards = [self._shard(index, blocks) for index in self._lying.devices]
        return assembled(self._lying.value.shape, self._lying.sharding, shards)

    def _shard(self, index: int, blocks: dict[int, Block]) -> jax.Array:
        lying, device = self._lying, self._lying.devices[index]
        own = lying.box(index)
        offsets: list[Shape] = []
        parts: list[jax.Array | Block] = []
        for box, piece in self._pieces[index]:
            offsets.append(relative_to(box, own[0])[0])
            if isinstance(piece, jax.Array):
                parts.append(piece)
                continue
            if id(piece) not in blocks:
                blocks[id(piece)] = piece()
            parts.append(blocks[id(piece)])
        if len(parts) == 1 and parts[0].shape == lying.shard_shape:
            return copied(parts[0], device)
        if all(isinstance(part, np.ndarray) for part in parts):
            whole = np.empty(lying.shard_shape, lying.dtype)
            for offset, part in zip(offsets, parts, strict=True):
                whole[slices_of_box((offset, part.shape))] = part
            return copied(whole, device)
        placed = [jax.device_put(part, device) for part in parts]
        joined: jax.Array = _joined(lying.shard_shape, tuple(offsets), *placed)
        return joined


# Compiled, since JAX dispatches that faster than a single operation.
own_copy: Callable[[jax.Array], jax.Array] = jax.jit(jnp.copy)


def copied(block: jax.Array | Block, device: Device) -> jax.Array:
    """A block on a device, which shares its memory with no array of JAX."""
    if isinstance(block, jax.Array) and block.devices() == {device}:
        own: jax.Array = own_copy(block)
        return own
    moved: jax.Array = jax.device_put(block, device)
    return moved


def cut(shard: jax.Array, box: Box) -> jax.Array:
    """A box of a shard, counted within it, on the shard's device; all of it is the shard itself."""
    offset, shape = box
    if shape == shard.shape:
        return shard
    limits = tuple(begin + extent for begin, extent in zip(offset, shape, strict=True))
    return jax.lax.slice(shard, offset, limits)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _joined(shape: Shape, offsets: tuple[Shape, ...], *parts: jax.Array) -> jax.Array:
    whole = jnp.zeros(shape, parts[0].dtype)
    for offset, part in zip(offsets, parts, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, part, offset)
    return whole
