"""JAX arrays that come to be on their devices: piece by piece, or in memory that the engine fills.

For loads with little host memory each device's part of an array begins as zeros there; every piece is sent to
the device and written into the part in place (the part is donated to the update). Invariants: a piece is no
longer needed on the host once `put` returns; beside the array, its devices hold one piece.

What the engine fills is made of zeros by JAX, in its own memory, so that it can be donated like any other.
Invariants: the engine writes to arrays only once the zeros are there, and before anybody else has seen the
array: for JAX they have never had another value. Small arrays are not worth a call for each, and go through
host memory in batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from waystation._threads import Threads
from waystation.frameworks import dtypes
from waystation.frameworks.base import CastRule, DeviceArrays, Target
from waystation.frameworks.jax_dtypes import WIDE, jax_dtype, wide_enabled
from waystation.frameworks.jax_targets import Placement, narrowed, wide_mode
from waystation.grid import volume

_INDEX_LIMIT = 1 << 31  # of positions, which are counted in 32 bits


def stays_on_host(target: Target) -> bool:
    """Whether an array is made of host memory as it was read, without a copy."""
    place: Placement = target.placement
    on_host = all(device.platform == "cpu" for device in place.devices)
    return on_host and _is_ordinary(target) and not is_narrowed(target)


def goes_in_pieces(target: Target) -> bool:
    """Whether pieces can be written into an array on its devices, by this thread."""
    return (
        _is_ordinary(target)
        and not dtypes.is_key(target.dtype)
        and target.placement.wide == wide_enabled()
        and all(extent < _INDEX_LIMIT for _, shape in target.boxes for extent in shape)
    )


def _is_ordinary(target: Target) -> bool:
    """Whether an array is in the default memory of its devices, and there as it is on the host."""
    place: Placement = target.placement
    kind = place.sharding.memory_kind
    by_default = all(kind in (None, device.default_memory().kind) for device in place.devices)
    return by_default and place.layout is None and target.dtype not in dtypes.SUB_BYTE


def is_narrowed(target: Target) -> bool:
    """Whether JAX holds the elements in fewer bits than they are stored in."""
    return target.dtype in WIDE and not target.placement.wide


class PieceWriter:
    """Puts one array together on its devices."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._place: Placement = target.placement
        self._dtype = jax_dtype(WIDE[target.dtype] if is_narrowed(target) else target.dtype)
        self._parts: list[Any] = [None] * len(self._place.devices)

    def put(self, box_number: int, offset: tuple[int, ...], values: np.ndarray[Any, Any]) -> None:
        """Places a part of a box of the target, `offset` counted from the box; returns once the host
        memory of `values` is no longer needed."""
        if is_narrowed(self._target):
            values = narrowed(values, 0)
        for number, device in enumerate(self._place.devices):
            if self._place.box_numbers[number] == box_number:
                with self._on(device):
                    self._parts[number] = self._updated(number, device, offset, values)
        jax.block_until_ready(self._parts)

    @property
    def item_bytes(self) -> int:
        """Of an element on its devices."""
        return int(np.dtype(self._dtype).itemsize)

    def parts(self) -> list[Any]:
        """What each device has of the array: zeros, where nothing was put."""
        for number, device in enumerate(self._place.devices):
            with self._on(device):
                self._parts[number] = self._part(number, device)
        return self._parts

    def finish(self) -> Any:
        """The array, once all of it has been put."""
        parts = self.parts()
        if len(parts) == 1 and parts[0].sharding == self._place.sharding:
            return parts[0]
        return jax.make_array_from_single_device_arrays(
            self._target.shape, self._place.sharding, parts, dtype=self._dtype
        )

    def _updated(self, number: int, device: Any, offset: Sequence[int], values: Any) -> Any:
        piece = jax.device_put(values, self._sharding(device))
        if piece.shape == self._target.boxes[self._place.box_numbers[number]][1]:
            return piece
        return _write(self._part(number, device), piece, [np.int32(at) for at in offset])

    def _part(self, number: int, device: Any) -> Any:
        part = self._parts[number]
        if part is None:
            shape = self._target.boxes[self._place.box_numbers[number]][1]
            part = _zeros(shape, self._dtype, self._sharding(device))()
        return part

    @property
    def kind(self) -> Hashable:
        """Arrays of one kind are made by the same programs."""
        shapes = tuple(self._target.boxes[number][1] for number in self._place.box_numbers)
        return shapes, self._dtype, tuple(self._place.devices), self._place.committed

    def _sharding(self, device: Any) -> SingleDeviceSharding | None:
        """None for arrays that are merely where JAX puts arrays by default."""
        return SingleDeviceSharding(device) if self._place.committed else None

    def _on(self, device: Any) -> AbstractContextManager[Any]:
        manager: AbstractContextManager[Any] = (
            nullcontext() if self._place.committed else jax.default_device(device)
        )
        return manager


@lru_cache(maxsize=1024)
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: SingleDeviceSharding | None) -> Callable[[], Any]:
    """A program that makes zeros; JAX compiles it when it is first called, once for each kind of array."""
    placed: dict[str, Any] = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(lambda: jnp.zeros(shape, dtype), **placed)


def _with_parts(writers: Sequence[PieceWriter]) -> list[list[Any]]:
    """The zeros of all writers.

    A new kind of array costs tens of milliseconds of compiling. Threads make the first arrays of all kinds,
    so that JAX compiles for several kinds at once.
    """
    firsts = list({writer.kind: writer for writer in writers}.values())
    wide = wide_enabled()  # a setting of the thread

    def make(writer: PieceWriter) -> None:
        with wide_mode(wide):
            writer.parts()

    if len(firsts) > 1:
        with Threads(min(len(firsts), os.cpu_count() or 1), "kinds of arrays") as threads:
            list(threads.map(make, firsts))
    return [writer.parts() for writer in writers]


@partial(jax.jit, donate_argnums=0)
def _write(part: Any, piece: Any, offset: Sequence[Any]) -> Any:
    return jax.lax.dynamic_update_slice(part, piece, offset)


LEAST_BYTES = 1 << 20


def goes_to_devices(target: Target, stored_dtype: str) -> bool:
    """Whether the engine can bring an array to its devices: a large one, as it is stored, in the memory of
    NVIDIA's devices."""
    place: Placement = target.placement
    if not place.devices or any(device.platform == "cpu" for device in place.devices):
        return False
    return (
        stored_dtype == target.dtype
        and all("cuda" in device.client.platform_version.lower() for device in place.devices)
        and goes_in_pieces(target)
        and not is_narrowed(target)
        and min(volume(box) for box in target.boxes) * PieceWriter(target).item_bytes >= LEAST_BYTES
    )


def on_devices(targets: Sequence[Target], stored_dtypes: Sequence[str], rule: CastRule) -> DeviceArrays:
    """Arrays there, to be filled; they are wanted as they are stored."""
    del stored_dtypes, rule
    return _DeviceArrays(targets)


class _DeviceArrays:
    """Arrays in the making, see `frameworks.base.DeviceArrays`."""

    def __init__(self, targets: Sequence[Target]) -> None:
        writers = [PieceWriter(target) for target in targets]
        self._writers: list[PieceWriter | None] = [*writers]
        own = _with_parts(writers)
        jax.block_until_ready(own)
        self.regions: list[tuple[int, int, int]] = []
        self.places: list[list[tuple[int, int]]] = []
        for target, parts in zip(targets, own, strict=True):
            place: Placement = target.placement
            addresses = [part.unsafe_buffer_pointer() for part in parts]
            self.places.append(list(zip(place.box_numbers, addresses, strict=True)))
            for device, part, address in zip(place.devices, parts, addresses, strict=True):
                self.regions.append((device.local_hardware_id, address, part.nbytes))

    def take(self, number: int) -> Any:
        """An array, once its memory is filled."""
        writer, self._writers[number] = self._writers[number], None
        assert writer is not None
        return writer.finish()
