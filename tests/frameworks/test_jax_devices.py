"""JAX arrays whose memory somebody else fills: here that of CPU devices. GPUs are for `tests/gpu`."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from waystation.frameworks import registry
from waystation.frameworks.base import CastRule, StoredArray, Target

HOST = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)


def target_of(sharding: Sharding | None, dtype: str = "float32") -> Target:
    codec = registry.codec_by_name("jax")
    stored = StoredArray(HOST.shape, dtype, "numpy", "F32", HOST.shape, None, {})
    (target,) = codec.placed([stored], [dtype], [codec.place_of(sharding)])
    return target


def shardings() -> list[Sharding | None]:
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    specs = [PartitionSpec("x"), PartitionSpec(), PartitionSpec(None, "x")]
    return [None, SingleDeviceSharding(devices[-1]), *(NamedSharding(mesh, spec) for spec in specs)]


@pytest.mark.parametrize("number", range(5))
def test_what_is_written_to_the_places_is_the_array(number: int) -> None:
    sharding = shardings()[number]
    codec: Any = registry.codec_by_name("jax")
    target = target_of(sharding)
    made = codec.devices.on_devices(
        [target, target], ["float32", "float32"], CastRule(may_lose=False, option="")
    )
    for factor, places in enumerate(made.places, 1):
        assert len(places) == len(target.placement.devices)
        for box_number, address in places:
            (row, column), (rows, columns) = target.boxes[box_number]
            own = np.ascontiguousarray(HOST[row : row + rows, column : column + columns]) * factor
            inside = [
                begin <= address and address + own.nbytes <= begin + nbytes
                for _, begin, nbytes in made.regions
            ]
            assert sum(inside) == 1
            ctypes.memmove(address, own.ctypes.data, own.nbytes)
    for factor in (1, 2):
        array = made.take(factor - 1)
        np.testing.assert_array_equal(np.asarray(array), HOST * factor)
        assert array.committed is (sharding is not None)
        if sharding is not None:
            assert array.sharding == sharding


def test_only_arrays_of_gpus_are_brought_by_the_engine() -> None:
    codec: Any = registry.codec_by_name("jax")
    assert not any(codec.devices.goes_to_devices(target_of(sharding), "float32") for sharding in shardings())
