"""What processes do that share an object store. Each function runs in every process."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tests.distributed.jax_scenarios import join
from tests.support.programs import Place
from tests.support.s3 import context

import waystation


def save_and_load(place: Place, endpoint: str, path: str) -> bool:
    """Saves, overwrites and loads with another sharding; returns whether this process has what it should."""
    join(place, 2)
    values = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x", None), (None, "x")))
    array = jax.make_array_from_callback(values.shape, rows, lambda index: values[index])
    with context(endpoint):
        waystation.save(path, {"w": array, "step": 1})
        waystation.save_async(path, {"w": array, "step": 2}, overwrite=True).result()
        asked = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=columns), "step": 0}
        loaded = waystation.load(path, asked)
    own = loaded["w"].addressable_shards
    return loaded["step"] == 2 and all((shard.data == values[shard.index]).all() for shard in own)


def save_beside(place: Place, endpoint: str, run: str) -> list[int]:
    """Saves three steps, of which each shares with the one before it, loads the last once the others are
    deleted, and returns the bytes that this process has shared of each."""
    join(place, 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x", None))

    def array(start: int) -> jax.Array:
        values = np.arange(start, start + (1 << 16), dtype=np.float32).reshape(256, 256)
        return jax.make_array_from_callback(values.shape, rows, lambda index: values[index])

    seen: list[waystation.SaveStatistics] = []
    options = context(endpoint)
    options.array.saving.on_statistics = seen.append
    frozen = array(0)
    with options:
        for step in range(1, 4):
            state = {"frozen": frozen, "trained": array(1000 * step)}
            before = f"{run}/{step - 1}" if step > 1 else None
            waystation.save(f"{run}/{step}", state, unchanged_from=before)
        for step in (1, 2):
            waystation.delete(f"{run}/{step}")
        loaded = waystation.load(f"{run}/3", state)
    for name, expected in state.items():
        for own, wanted in zip(loaded[name].addressable_shards, expected.addressable_shards, strict=True):
            assert np.array_equal(own.data, wanted.data)
    return [each.bytes_shared for each in seen]
