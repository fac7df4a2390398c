"""`arrays` and `multihost`, beside those of Orbax."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as oracle

import waystation
from waystation import arrays, errors, multihost
from waystation.frameworks import AbstractNumpy


def sharded() -> jax.Array:
    mesh = jax.make_mesh((4,), ("x",))
    return jax.device_put(jnp.ones((8, 2), jnp.bfloat16), NamedSharding(mesh, PartitionSpec("x")))


VALUES: list[Any] = [3, 2.5, True, np.float32(1.5), np.arange(3), np.zeros((2, 0), np.int8)]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_become_what_they_become_in_orbax(value: Any) -> None:
    ours, theirs = arrays.to_shape_dtype_struct(value), oracle.arrays.to_shape_dtype_struct(value)
    assert type(ours) is type(theirs)
    assert ours == theirs


def test_arrays_keep_their_sharding() -> None:
    array = sharded()
    for value in (array, arrays.to_shape_dtype_struct(array)):
        ours, theirs = (module.arrays.to_shape_dtype_struct(value) for module in (waystation, oracle))
        assert ours == theirs
        assert ours.sharding == array.sharding
    assert arrays.to_shape_dtype_struct(array, dtype=jnp.float32).dtype == jnp.float32
    assert arrays.to_shape_dtype_struct(array, support_format=True).format == array.format


def test_scalars_become_what_is_asked_for() -> None:
    found = arrays.to_shape_dtype_struct(3, scalar_dtype=float)
    assert (found, type(found)) == (3.0, float)
    with pytest.raises(errors.InvalidInput, match="no shape"):
        arrays.to_shape_dtype_struct(object())


def test_keys_stay_keys(tmp_path: Path) -> None:
    key = jax.random.key(3)
    waystation.save(tmp_path / "checkpoint", {"key": key})
    loaded = waystation.load(tmp_path / "checkpoint", {"key": arrays.to_shape_dtype_struct(key)})
    assert loaded["key"] == key


def test_the_protocols_are_those_of_what_metadata_show(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": sharded(), "n": np.arange(3)})
    found = waystation.metadata(tmp_path / "checkpoint").metadata
    assert isinstance(found["x"], arrays.AbstractShardedArray)
    assert isinstance(found["n"], arrays.AbstractArray)


def test_metadata_say_how_arrays_are_stored(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.saving.storage_options_for = lambda path, _: waystation.StorageOptions(
        chunk_bytes=8 if path == "x" else None
    )
    with context:
        waystation.save(tmp_path / "checkpoint", {"x": sharded(), "n": np.arange(3), "z": np.ones(())})
    found = waystation.metadata(tmp_path / "checkpoint").metadata
    assert (found["x"].storage_metadata.chunk_shape, found["x"].storage_metadata.write_shape) == (
        (2, 2),
        (2, 2),
    )
    assert found["n"].storage_metadata.chunk_shape == found["n"].storage_metadata.write_shape == (3,)
    assert found["z"].storage_metadata.chunk_shape == ()
    assert AbstractNumpy((3,)).storage_metadata is None
    assert found["x"] == arrays.to_shape_dtype_struct(sharded())


def _shown(metadata: Any) -> Any:
    """What sharding metadata show, in values that compare."""
    if not hasattr(metadata, "partition_spec"):
        return metadata.device_str
    return (
        metadata.shape.tolist(),
        *(metadata.axis_names, metadata.axis_types, metadata.partition_spec),
        [[device.id for device in row] for row in metadata.device_mesh.mesh],
        repr(metadata),
    )


@pytest.mark.parametrize("use_ocdbt", [None, True])
def test_metadata_say_how_arrays_were_sharded_as_orbax_does(use_ocdbt: bool | None, tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    specs = (PartitionSpec("x", "y"), PartitionSpec(None, ("x", "y")), PartitionSpec("y"), PartitionSpec())
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    state = {str(number): jax.device_put(jnp.ones((4, 4)), each) for number, each in enumerate(shardings)}
    state |= {"one": jax.device_put(jnp.ones(3), jax.devices()[1]), "anywhere": jnp.ones(3)}
    oracle.save(tmp_path / "theirs", state)
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    with context:
        waystation.save(tmp_path / "ours", state)
    theirs = oracle.metadata(tmp_path / "theirs").metadata
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        found = waystation.metadata(path).metadata
        for name, leaf in theirs.items():
            ours = found[name].sharding_metadata
            assert _shown(ours) == _shown(leaf.sharding_metadata)
            assert ours.to_jax_sharding() == leaf.sharding_metadata.to_jax_sharding() == state[name].sharding
            assert ours == waystation.metadata(path).metadata[name].sharding_metadata
    assert found["0"].sharding_metadata != found["1"].sharding_metadata


_SHOW_ELSEWHERE = """
import sys, waystation
leaf = waystation.metadata(sys.argv[1]).metadata["x"]
assert leaf.sharding is None, leaf.sharding
shown = leaf.sharding_metadata
assert (shown.shape.tolist(), shown.axis_names, shown.partition_spec) == ([4], ["x"], ("x",))
try:
    shown.to_jax_sharding()
except waystation.errors.InvalidInput as error:
    assert "devices" in str(error)
else:
    raise AssertionError
"""


def test_sharding_metadata_need_no_devices(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": sharded()})
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    program = [sys.executable, "-c", _SHOW_ELSEWHERE, str(tmp_path / "checkpoint")]
    subprocess.run(program, env=environment, check=True, timeout=120)


def test_a_program_of_one_process() -> None:
    for module in (multihost, oracle.multihost):
        assert (module.process_count(), module.process_index()) == (1, 0)
        assert [module.is_primary_host(host) for host in (0, None, 1)] == [True, True, False]
        assert not module.is_pathways_backend()
        asyncio.run(module.sync_global_processes("key", operation_id="3"))


def test_waiting_for_others_has_its_limits() -> None:
    wait = multihost.sync_global_processes
    with pytest.raises(ValueError, match="positive"):
        asyncio.run(wait("key", operation_id="3", timeout=-1))
    with pytest.raises(ValueError, match="process 0 is to wait"):
        asyncio.run(wait("key", operation_id="3", processes=[1, 2]))
    asyncio.run(wait("key", operation_id="3", processes=[0]))
