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
