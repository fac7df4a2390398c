"""What the processes of a JAX program do in the tests. Each function runs in every process."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.distributed.cases import KEY, Case, Placed, State
from tests.support.programs import Place

import waystation
from waystation.layouts.native import read


def join(place: Place, devices: int) -> None:
    """Joins the other processes, with so many fake devices in each."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    place.connect()
    assert jax.device_count() == devices * place.count


def sharding_of(placed: Placed) -> NamedSharding:
    """The sharding that is described."""
    devices = np.array([jax.devices()[number] for number in placed.order]).reshape(placed.mesh)
    mesh = Mesh(devices, tuple(f"m{axis}" for axis in range(len(placed.mesh))))
    return NamedSharding(mesh, PartitionSpec(*(tuple(f"m{axis}" for axis in axes) for axes in placed.spec)))


def make(case: Case) -> jax.Array:
    """The array of a case, each device with its part."""
    values, sharding = case.values(), sharding_of(case.saved)
    if case.dtype != KEY:
        return jax.make_array_from_callback(case.shape, sharding, lambda index: values[index])
    of_data = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None))
    return jax.random.wrap_key_data(
        jax.make_array_from_callback(values.shape, of_data, lambda index: values[index])
    )


def check(case: Case, array: Any, placed: Placed) -> None:
    """Compares what this process holds of an array, bit by bit."""
    assert array.shape == case.shape, case
    assert str(array.dtype) == case.dtype, case
    assert array.sharding.is_equivalent_to(sharding_of(placed), len(case.shape)), (case, array.sharding)
    values = case.values()
    data = jax.random.key_data(array) if case.dtype == KEY else array
    for shard in data.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(values[shard.index]).tobytes(), case


def save(place: Place, path: Path, state: State, storage: waystation.Context | None = None) -> None:
    """Saves a state, with leaves of which only the primary's are kept."""
    tree: dict[str, Any] = {str(number): make(case) for number, case in enumerate(state.cases)}
    tree["step"] = state.step + place.index
    tree["host"] = np.arange(10) + place.index
    tree["local"] = jnp.float32(state.step)
    context = waystation.Context(storage)
    saving = context.array.saving
    saving.min_slice_bytes_for_replica_parallel = state.options.min_slice_bytes
    saving.use_replica_parallel = state.options.use_replica_parallel
    saving.storage_options.chunk_bytes = state.options.chunk_bytes
    context.file.file_bytes_target = state.options.file_bytes_target
    with context:
        if state.options.asynchronous:
            waystation.save_async(path, tree).result()
        else:
            waystation.save(path, tree)


def load(place: Place, path: Path, state: State) -> None:
    """Loads a state into other shardings."""
    abstract: dict[str, Any] = {}
    for number, case in enumerate(state.cases):
        dtype = jax.random.key(0).dtype if case.dtype == KEY else case.dtype
        abstract[str(number)] = jax.ShapeDtypeStruct(case.shape, dtype, sharding=sharding_of(case.loaded))
    abstract |= {"step": int, "host": np.zeros(10, int), "local": np.float32(0)}
    with paged_tables(state.options.paged_tables):
        loaded = waystation.load(path, abstract)
    for number, case in enumerate(state.cases):
        check(case, loaded[str(number)], case.loaded)
    assert loaded["step"] == state.step
    assert loaded["host"].tolist() == list(range(10))
    assert loaded["local"] == state.step


@contextlib.contextmanager
def paged_tables(wanted: bool) -> Iterator[None]:
    """Has every process read the pages of the tables that it needs, however small they are."""
    defaults = read.read_files.__kwdefaults__
    usual = defaults["paged_from_bytes"]
    if wanted:
        defaults["paged_from_bytes"] = 0
    try:
        yield
    finally:
        defaults["paged_from_bytes"] = usual


def load_as_saved(place: Place, path: Path, state: State) -> None:
    """Loads without an abstract state, on the devices that have saved."""
    loaded = waystation.load_async(path).result()
    for number, case in enumerate(state.cases):
        check(case, loaded[str(number)], case.saved)
    assert loaded["local"].is_fully_addressable


def save_to_disk(place: Place, path: Path, state: State) -> None:
    """Saves a state to a disk that only this process sees."""
    save(place, path / f"disk {place.index}", state, local_storage())


def load_from_disk(place: Place, path: Path, state: State) -> None:
    """Loads what this process has saved there, its own values too."""
    own = path / f"disk {place.index}"
    with local_storage():
        load_as_saved(place, own, state)
        loaded = waystation.load(own)
    assert loaded["step"] == state.step + place.index
    assert loaded["host"][0] == place.index


def local_storage() -> waystation.Context:
    """Options of programs each of whose processes has a storage of its own."""
    context = waystation.Context()
    context.multiprocessing.primary_host = None
    return context


ACTIONS = {
    function.__name__: function for function in (save, load, load_as_saved, save_to_disk, load_from_disk)
}


def serve(place: Place, devices: int) -> None:
    """Does what the test asks for, one thing after another, and reports how each ended: None is well."""
    join(place, devices)
    while (asked := place.receive()) is not None:
        action, path, state = asked
        try:
            ACTIONS[action](place, path, state)
        except BaseException:
            place.report(traceback.format_exc())
        else:
            place.report(None)


def reshard(place: Place, devices: int, chunk_bytes: int) -> dict[str, int]:
    """Saves a matrix by rows and loads it by columns; returns what share of the bytes read was needed."""
    join(place, devices)
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
    path = place.directory / "checkpoint"
    with context:
        waystation.save(path, state)
        abstract = {"a": jax.ShapeDtypeStruct(values.shape, "float32", sharding=columns)}
        loaded = waystation.load(path, abstract)["a"]
    for shard in loaded.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), values[shard.index])
    (statistics,) = seen
    return {"needed": statistics.bytes_needed, "read": statistics.bytes_read}


def counted(step: int) -> dict[str, Any]:
    """The state of a training program at a step, over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharded = NamedSharding(mesh, PartitionSpec("x"))
    values = np.arange(48 * 65536, dtype=np.float32).reshape(48, 65536) + step
    return {
        "rows": jax.make_array_from_callback(values.shape, sharded, lambda index: values[index]),
        "step": step,
    }


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / f"step {step}"


def latest_step(root: Path) -> int:
    """The last step that has a checkpoint; 0 if there is none."""
    steps = [int(path.name.split()[1]) for path in root.iterdir() if waystation.is_checkpoint(path)]
    return max(steps, default=0)


def train(place: Place, devices: int, root: Path) -> None:
    """Goes on from the last checkpoint, or from nothing, and saves one step after another without end."""
    join(place, devices)
    step = latest_step(root)
    if step:
        require_step(waystation.load(step_path(root, step), abstract_of(counted(step))), step)
    place.report(step)
    while True:
        step += 1
        waystation.save_async(step_path(root, step), counted(step), overwrite=True).result()
        place.report(step)


def abstract_of(state: dict[str, Any]) -> dict[str, Any]:
    """What to ask for in order to get such a state."""
    rows = state["rows"]
    return {"rows": jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=rows.sharding), "step": int}


def require_step(loaded: dict[str, Any], step: int) -> None:
    """Compares a loaded state with that of the step, bit by bit."""
    assert loaded["step"] == step
    wanted = counted(step)["rows"]
    assert loaded["rows"].sharding == wanted.sharding
    for shard, other in zip(loaded["rows"].addressable_shards, wanted.addressable_shards, strict=True):
        assert np.asarray(shard.data).tobytes() == np.asarray(other.data).tobytes()
