"""What processes of a program do that save by genuine Orbax and load by us."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.programs import Place

import waystation


def state_of(values: dict[str, Any]) -> dict[str, Any]:
    """Arrays over the devices of all processes: sharded, replicated, and one that only some devices hold."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))
    shardings = {
        "rows": PartitionSpec("x"),
        "columns": PartitionSpec(None, ("y", "x")),
        "both": PartitionSpec("y", "x"),
        "replicated": PartitionSpec(),
        "half": PartitionSpec("x"),
    }
    return {
        name: jax.make_array_from_callback(
            values[name].shape, NamedSharding(mesh, spec), lambda index, name=name: values[name][index]
        )
        for name, spec in shardings.items()
    } | {"step": 7, "host": values["rows"][0], "name": "run"}


def values() -> dict[str, Any]:
    import numpy as np

    generator = np.random.default_rng(5)
    names = ("rows", "columns", "both", "replicated", "half")
    return {name: generator.standard_normal((16, 24)).astype(np.float32) for name in names}


def start(place: Place, devices: int) -> None:
    """Joins the processes, each with so many devices."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    place.connect()


def save(place: Place, devices: int, path: Path, options: dict[str, Any]) -> None:
    """Saves by genuine Orbax."""
    start(place, devices)
    from tests.orbax import oracle

    oracle.save(path, state_of(values()), **options)


def load(place: Place, devices: int, path: Path) -> list[str]:
    """Loads, into the shardings of this program; says which arrays are wrong."""
    start(place, devices)
    import jax
    import numpy as np

    state = state_of(values())
    abstract = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        state,
    )
    loaded = waystation.load(path, abstract)
    wrong = [name for name in ("step", "name") if loaded[name] != state[name]]
    for name, expected in values().items():
        array = loaded[name]
        wrong += [
            f"{name} on {shard.device}"
            for shard in array.addressable_shards
            if np.asarray(shard.data).tobytes() != expected[shard.index].tobytes()
        ]
    return wrong


def load_model(place: Place, devices: int, path: Path) -> list[str]:
    """Loads a published model by both libraries; says in what they differ."""
    start(place, devices)
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from orbax.checkpoint import v1

    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    abstract = {
        "layers.0.weight": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=rows),
        "layers.6.weight": jax.ShapeDtypeStruct((8, 10), "bfloat16"),
        "scalar": jax.ShapeDtypeStruct((), np.float32),
    }
    wrong: list[str] = []
    found: list[dict[str, Any]] = []
    for library in (v1, waystation):
        context: Any = library.Context()
        context.checkpoint_layout = library.options.CheckpointLayout.SAFETENSORS
        with context:
            found.append(library.load(path, abstract))
            try:
                library.load(path)
                wrong.append(f"{library.__name__} loads without an abstract state")
            except ValueError:
                pass
    theirs, ours = found
    for name, other in theirs.items():
        own = ours[name]
        if not own.sharding.is_equivalent_to(other.sharding, other.ndim):
            wrong.append(f"{name} has {own.sharding}, not {other.sharding}")
        pairs = zip(own.addressable_shards, other.addressable_shards, strict=True)
        if not all(np.array_equal(np.asarray(one.data), np.asarray(two.data)) for one, two in pairs):
            wrong.append(f"{name} has other values")
    return wrong
