"""One process of a JAX program that saves or loads random states: `python -m tests.distributed.jax_program
ACTION DIRECTORY SEEDS…`, with its place among the processes in the environment.

It writes `done` when all went as it must; anything else is in its standard error.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.distributed.cases import Case, random_cases, random_mesh, random_spec

import waystation

ARRAYS = 12


def start() -> None:
    """Joins the other processes."""
    count, index = int(os.environ["PROCESS_COUNT"]), int(os.environ["PROCESS_INDEX"])
    if count > 1:
        jax.distributed.initialize(
            os.environ["COORDINATOR"],
            count,
            index,
            heartbeat_timeout_seconds=int(os.environ.get("HEARTBEAT_S", "100")),
        )
    assert jax.process_count() == count


def shardings(chooser: random.Random, cases: list[Case]) -> dict[str, NamedSharding]:
    """A random sharding for every array, over random meshes of all devices."""
    found = {}
    for case in cases:
        mesh_shape, order = random_mesh(chooser, jax.device_count())
        devices = np.array([jax.devices()[number] for number in order]).reshape(mesh_shape)
        mesh = Mesh(devices, tuple(f"m{axis}" for axis in range(len(mesh_shape))))
        spec = PartitionSpec(*random_spec(chooser, case.shape, mesh_shape))
        found[case.name] = NamedSharding(mesh, spec)
    return found


def make(case: Case, sharding: NamedSharding) -> jax.Array:
    """The array of a case, each device with its part."""
    values = case.values()
    return jax.make_array_from_callback(case.shape, sharding, lambda index: values[index])


def check(case: Case, array: Any, sharding: NamedSharding) -> None:
    """Compares what this process holds of an array, bit by bit."""
    assert array.sharding.is_equivalent_to(sharding, len(case.shape)), (case, array.sharding, sharding)
    assert array.shape == case.shape, case
    assert str(array.dtype) == case.dtype, case
    values = case.values()
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(values[shard.index]).tobytes(), case


def save(directory: Path, seed: int) -> None:
    """Saves a random state, every second time asynchronously, with random options."""
    chooser = random.Random(seed)
    cases = random_cases(seed, ARRAYS)
    places = shardings(chooser, cases)
    state: dict[str, Any] = {case.name: make(case, places[case.name]) for case in cases}
    state["step"] = seed
    state["host"] = np.arange(10) + (0 if jax.process_index() == 0 else 7)
    state["local"] = jnp.float32(seed)
    context = waystation.Context()
    context.array.saving.min_slice_bytes_for_replica_parallel = chooser.choice((1, 64, None))
    context.array.saving.use_replica_parallel = chooser.choice((None, False))
    context.array.saving.storage_options.chunk_bytes = chooser.choice((None, 16, 1000))
    context.file.file_bytes_target = chooser.choice((2000, 1 << 31))
    with context:
        if seed % 2:
            waystation.save_async(directory / str(seed), state).result()
        else:
            waystation.save(directory / str(seed), state)


def load(directory: Path, seed: int) -> None:
    """Loads a random state into random shardings of the present devices."""
    chooser = random.Random(-seed - jax.process_count())
    cases = random_cases(seed, ARRAYS)
    places = shardings(chooser, cases)
    abstract: dict[str, Any] = {
        case.name: jax.ShapeDtypeStruct(case.shape, case.dtype, sharding=places[case.name]) for case in cases
    }
    abstract |= {"step": int, "host": np.zeros(10, int), "local": np.float32(0)}
    loaded = waystation.load(directory / str(seed), abstract)
    for case in cases:
        check(case, loaded[case.name], places[case.name])
    assert loaded["step"] == seed
    assert loaded["host"].tolist() == list(range(10))
    assert loaded["local"] == seed


def load_as_saved(directory: Path, seed: int) -> None:
    """Loads without an abstract state, on the devices that have saved."""
    chooser = random.Random(seed)
    cases = random_cases(seed, ARRAYS)
    places = shardings(chooser, cases)
    loaded = waystation.load_async(directory / str(seed)).result()
    for case in cases:
        check(case, loaded[case.name], places[case.name])
    assert loaded["local"].is_fully_addressable


def reshard(directory: Path, chunk_bytes: int) -> None:
    """Saves a matrix by rows and loads it by columns; writes what share of the bytes read was needed."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    values = np.arange(4096 * 4096, dtype=np.float32).reshape(4096, 4096)
    rows = NamedSharding(mesh, PartitionSpec("x"))
    columns = NamedSharding(mesh, PartitionSpec(None, "x"))
    state = {"a": jax.make_array_from_callback(values.shape, rows, lambda index: values[index])}
    context = waystation.Context()
    if chunk_bytes:
        context.array.saving.storage_options.chunk_bytes = chunk_bytes
        context.array.saving.storage_options.chunk_axes = (1,)
    seen: list[Any] = []
    context.array.loading.on_statistics = seen.append
    path = directory / f"chunks of {chunk_bytes}"
    with context:
        waystation.save(path, state)
        abstract = {"a": jax.ShapeDtypeStruct(values.shape, "float32", sharding=columns)}
        loaded = waystation.load(path, abstract)["a"]
    for shard in loaded.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), values[shard.index])
    (statistics,) = seen
    told = {"needed": statistics.bytes_needed, "read": statistics.bytes_read}
    (directory / f"{chunk_bytes}-{jax.process_index()}.json").write_text(json.dumps(told))


ACTIONS = {"reshard": reshard, "save": save, "load": load, "load-as-saved": load_as_saved}


def main() -> None:
    directory, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    start()
    for action, seed in plan:
        ACTIONS[action](directory, seed)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
