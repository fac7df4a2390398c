"""The cells of Orbax's guide to performance, run in a program of its own with the guide's sixteen devices."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from tests.support.programs import Place

import waystation
from waystation.layouts.native.read import open_checkpoint, open_checkpointable

DEVICES = 16
CHUNK_BYTES = 16


def cells(place: Place) -> dict[str, Any]:
    """The guide, cell by cell."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def mesh(*shape: int) -> Mesh:
        return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])

    def saved(name: str, array: jax.Array, **options: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        path = place.directory / name
        context = waystation.Context()
        for option, value in options.items():
            setattr(context.array.saving.storage_options, option, value)
        with context:
            waystation.save(path, {"a": array}, overwrite=True)
        assert np.array_equal(waystation.load(path)["a"], array)
        opened = open_checkpointable(str(path), open_checkpoint(str(path)), "state")
        return opened.tables.chunk_shape(0), array.sharding.shard_shape(array.shape)

    seen: dict[str, Any] = {}
    line = jnp.ones((128,), device=NamedSharding(mesh(16), P("x")))
    seen["as it comes"] = saved("not subchunked", line)
    seen["16 bytes"] = saved("subchunked", line, chunk_bytes=CHUNK_BYTES)
    rows = jnp.arange(32.0 * 64, device=NamedSharding(mesh(16), P("x"))).reshape(32, 64)
    rows = jax.device_put(rows, NamedSharding(mesh(16), P("x")))
    seen["rows"] = saved("rows", rows, chunk_bytes=CHUNK_BYTES)
    values = np.arange(1024, dtype=np.float32).reshape(32, 32)
    square = jax.device_put(values, NamedSharding(mesh(8, 2), P("x", "y")))
    seen["square"] = saved("square", square, chunk_bytes=CHUNK_BYTES)
    seen["axis 1"] = saved("axis 1", square, chunk_bytes=CHUNK_BYTES, chunk_axes=(1,))
    columns = NamedSharding(mesh(1, 16), P(None, "y"))
    assert columns.shard_shape((32, 32)) == (32, 2)
    for name in ("square", "axis 1"):
        abstract = {"a": jax.ShapeDtypeStruct((32, 32), "float32", sharding=columns)}
        loaded = waystation.load(place.directory / name, abstract)["a"]
        assert loaded.sharding == columns
        assert np.array_equal(loaded, values)
    replicas = NamedSharding(Mesh(np.asarray(jax.devices()).reshape(2, 8), ("replica", "model")), P("model"))
    array = jnp.arange(1024, device=replicas)
    waystation.save(place.directory / "replicas", [array])
    abstract_array = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicas)
    (loaded,) = waystation.load(place.directory / "replicas", [abstract_array])
    assert loaded.sharding == replicas
    seen["replicas"] = np.array_equal(loaded, array)
    return seen
