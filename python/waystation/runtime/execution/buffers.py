"""The arrays that a host keeps between runs, by handle.

Of each array a host holds the shards of its own devices. A handle may also stand for the error that kept its
array from being made, which whoever uses it gets; and an array may be *spilled*: its shards are in the memory
of the host instead of that of devices, until it is used. May be called from several threads.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from waystation._errors import WaystationError
from waystation.frameworks.jax_public import Device
from waystation.runtime.errors import BufferNotFound
from waystation.runtime.messages import Block, Fetched


@dataclass(frozen=True, slots=True)
class _Spilled:
    """Shards in the memory of the host, in the order of its devices."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    blocks: tuple[tuple[Device, Block], ...]


class Buffers:
    """Arrays by handle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, jax.Array | _Spilled | WaystationError] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, handle: int) -> bool:
        return handle in self._held

    @property
    def held_bytes(self) -> int:
        """Bytes of the shards that are in the memory of devices."""
        with self._lock:
            arrays = [found for found in self._held.values() if isinstance(found, jax.Array)]
        return sum(bytes_of(array) for array in arrays)

    def get(self, handle: int) -> jax.Array:
        """An array, on its devices.

        Raises:
            BufferNotFound: There is none.
            WaystationError: What kept it from being made.
        """
        with self._lock:
            found = self._held.get(handle)
        if isinstance(found, WaystationError):
            raise copy.copy(found)
        if found is None:
            raise BufferNotFound(
                f"there is no buffer '{handle}': it was not made, was freed, or was lost with its epoch"
            )
        return self.restore(handle) if isinstance(found, _Spilled) else found

    def set(self, handle: int, array: jax.Array | WaystationError) -> None:
        """Keeps an array, or what kept it from being made."""
        with self._lock:
            self._held[handle] = array

    def poison(self, handle: int, error: WaystationError) -> None:
        """Lets an array that turned out not to have been made raise, if its handle has not ended."""
        with self._lock:
            if handle in self._held:
                self._held[handle] = error

    def free(self, handles: Sequence[int]) -> None:
        """Forgets arrays; those that are still used are freed once they no longer are."""
        with self._lock:
            dropped = [self._held.pop(handle, None) for handle in handles]
        del dropped  # outside the lock: this may free memory

    def spill(self, handle: int) -> None:
        """Moves an array to the memory of the host; waits until it has been made.

        Where there is none, since it has been freed meanwhile or could not be made, there is nothing to move:
        what is wanted is its memory, for something else.
        """
        with self._lock:
            array = self._held.get(handle)
        if not isinstance(array, jax.Array):
            return
        # A copy: on CPUs NumPy would show the very memory that is to be given up.
        blocks = tuple((shard.device, np.array(shard.data, copy=True)) for shard in array.addressable_shards)
        with self._lock:
            if self._held.get(handle) is array:
                self._held[handle] = _Spilled(array.shape, array.sharding, blocks)

    def restore(self, handle: int) -> jax.Array:
        """Brings a spilled array back to its devices; one that is there stays."""
        with self._lock:
            found = self._held.get(handle)
        if not isinstance(found, _Spilled):
            return self.get(handle)
        shards = [jax.device_put(block, device) for device, block in found.blocks]
        array = assembled(found.shape, found.sharding, shards)
        self.set(handle, array)
        return array

    def fetched(self, handle: int) -> Fetched:
        """The shards of an array, each distinct one once in the island; waits until it has been made."""
        return shards_of(self.get(handle))


def assembled(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, shards: Sequence[jax.Array]
) -> jax.Array:
    """An array of the shards that lie on devices of this process."""
    dtype = shards[0].dtype
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards), dtype=dtype)


def bytes_of(array: jax.Array) -> int:
    """Bytes of the shards on this host. Also of an array that was donated in between, whose shards nobody may
    ask for any more."""
    shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return shard * len(array.sharding.addressable_devices)


def shards_of(array: Any) -> Fetched:
    """What this host answers when it is asked for an array."""
    blocks = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            offset = tuple(part.start or 0 for part in shard.index)
            blocks.append((offset, np.asarray(shard.data)))
    return Fetched(array.shape, tuple(blocks))
