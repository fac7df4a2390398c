"""What the processes of JAX programs do that load and broadcast. Each function returns what it saw."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from tests.distributed.broadcast_common import Case, damage, loading, meet, outcome, same_bits, told
from tests.support.programs import Place

import waystation
from waystation._options.array_loading import LoadAndBroadcastOptions

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "uint32",
    "complex64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "int4",
    "uint4",
    "float4_e2m1fn",
)
Layout = list[list[tuple[int, int]]]  # of the mesh: the process and the number of each device


def all_cases() -> dict[str, tuple[Case, tuple[Any, ...]]]:
    """Arrays with their specs; those that begin with `own` have no replicas."""
    cases: dict[str, tuple[Case, tuple[Any, ...]]] = {}
    for number, dtype in enumerate(DTYPES):
        cases[f"by model, {dtype}"] = Case(dtype, (6, 8, 5), number), (None, "model")
        cases[f"whole, {dtype}"] = Case(dtype, (7, 3), 100 + number), ()
    cases["scalar"] = Case("float32", (), 200), ()
    cases["large"] = Case("bfloat16", (64, 10_001), 201), ("model",)
    cases["empty"] = Case("float32", (0, 4), 202), (None, "model")
    cases["own"] = Case("float32", (24, 5), 203), (("replica", "model"),)
    cases["own by replica"] = Case("int8", (12, 5), 204), ("replica",)
    return cases


def start(place: Place) -> Any:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    place.connect()
    import jax

    return jax


def make_mesh(layout: Layout) -> Any:
    import jax

    devices = np.empty((len(layout), len(layout[0])), object)
    for row, line in enumerate(layout):
        for column, (process, number) in enumerate(line):
            own = [device for device in jax.devices() if device.process_index == process]
            devices[row, column] = own[number]
    return jax.sharding.Mesh(devices, ("replica", "model"))


def make_state(mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state and the abstract state that stands for it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    state, abstract = {}, {}
    for name, (case, spec) in all_cases().items():
        values = case.values()
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        state[name] = jax.make_array_from_callback(
            case.shape, sharding, lambda index, values=values: values[index]
        )
        abstract[name] = jax.ShapeDtypeStruct(case.shape, values.dtype, sharding=sharding)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state["keys"] = jax.jit(lambda: jax.random.split(jax.random.key(5), 3), out_shardings=everywhere)()
    abstract["keys"] = jax.ShapeDtypeStruct((3,), state["keys"].dtype, sharding=everywhere)
    return state, abstract


def wrong(state: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """The arrays that differ in a bit or a sharding."""
    import jax

    wrong = []
    for name, array in state.items():
        other = loaded[name]
        is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        data = [jax.random.key_data(keys) if is_key else keys for keys in (array, other)]
        pairs = zip(data[0].addressable_shards, data[1].addressable_shards, strict=True)
        same = all(
            one.device == two.device and same_bits(np.asarray(two.data), np.asarray(one.data))
            for one, two in pairs
        )
        if not same or array.sharding != other.sharding or array.dtype != other.dtype:
            wrong.append(name)
    return wrong


def loads(place: Place, layout: Layout, options: list[dict[str, Any]]) -> Any:
    """Saves a state and loads it with each of the given options."""
    jax = start(place)
    mesh = make_mesh(layout)
    state, abstract = make_state(mesh)
    path = place.directory / "checkpoint"
    seen: list[Any] = []
    found = []
    with loading(seen):
        waystation.save(path, state)
    for number, own in enumerate(options):
        with loading(seen, **own), jax.set_mesh(mesh):
            if number % 2:  # also with what was saved, and its shardings
                loaded = waystation.load(path)
            else:
                loaded = waystation.load(path, abstract)
        found.append({"wrong": wrong(state, loaded), **told(seen)})
    with loading(seen, load_and_broadcast=True, replica_axis="nowhere"):
        axis = outcome(lambda: waystation.load(path, abstract))
    with loading(seen, load_and_broadcast=True, replica_axis=7):
        number_of_axis = outcome(lambda: waystation.load(path, abstract))
    places = LoadAndBroadcastOptions(replica_axis_index=0, primary_replica_id=7)
    with loading(seen, load_and_broadcast=True, load_and_broadcast_options=places):
        replica = outcome(lambda: waystation.load(path, abstract))
    places = LoadAndBroadcastOptions(primary_replica_id=1)
    with loading(seen, load_and_broadcast=True, load_and_broadcast_options=places):
        replica_without_axis = outcome(lambda: waystation.load(path, abstract))
    return {
        "found": found,
        "axis": axis,
        "number of axis": number_of_axis,
        "replica": replica,
        "replica without axis": replica_without_axis,
    }


def many(place: Place, layout: Layout, count: int) -> Any:
    """Loads many small arrays: which of them are wrong, and how many collectives that took."""
    jax = start(place)
    from waystation.frameworks import jax_broadcast

    everywhere = jax.sharding.NamedSharding(make_mesh(layout), jax.sharding.PartitionSpec())
    dtypes, shapes = ("float32", "bfloat16", "int8", "bool"), ((), (3,), (0, 2), (5, 7), (1,))
    state = {}
    for number in range(count):
        case = Case(dtypes[number % 4], shapes[number % 5], number)
        values = case.values()
        state[f"{number}"] = jax.make_array_from_callback(
            case.shape, everywhere, lambda index, values=values: values[index]
        )
    abstract = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=everywhere)
        for name, array in state.items()
    }
    seen: list[Any] = []
    with loading(seen):
        waystation.save(place.directory / "many", state)
    collectives: list[int] = []
    broadcast = jax_broadcast._JaxBroadcaster.broadcast

    def counted(carrier: Any, layer: Any, nbytes: int, piece: Any) -> None:
        collectives.append(nbytes)
        broadcast(carrier, layer, nbytes, piece)

    jax_broadcast._JaxBroadcaster.broadcast = counted  # type: ignore[method-assign]
    with loading(seen, load_and_broadcast=True):
        loaded = waystation.load(place.directory / "many", abstract)
    return {"wrong": wrong(state, loaded), "collectives": len(collectives), **told(seen)}


def fails(place: Place, layout: Layout) -> Any:
    """The process that reads finds damage."""
    start(place)
    state, abstract = make_state(make_mesh(layout))
    path = place.directory / "checkpoint"
    waystation.save(path, state)
    if place.index == 0:
        damage(path)
    meet("damage")
    with loading([], load_and_broadcast=True):
        return outcome(lambda: waystation.load(path, abstract))
