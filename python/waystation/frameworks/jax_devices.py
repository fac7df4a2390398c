"""JAX arrays in the memory of CUDA devices, which the engine fills.

The arrays are made of zeros by JAX, in its own memory, so that they can be donated like any other.
Invariants: the engine writes to them only once the zeros are there, and before anybody else has seen the
array: for JAX they have never had another value. Small arrays are not worth a call for each, and go through
host memory in batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from waystation.frameworks.base import CastRule, DeviceArrays, Target
from waystation.frameworks.jax_pieces import PieceWriter, goes_in_pieces, is_narrowed
from waystation.frameworks.jax_targets import Placement
from waystation.grid import volume

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
        own = [writer.parts() for writer in writers]
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
