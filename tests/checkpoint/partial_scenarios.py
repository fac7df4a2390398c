"""What processes do that save in parts, and die over it."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from tests.support.programs import Place

import waystation
from waystation import errors, partial, storage
from waystation.layouts.native import commit
from waystation.storage.local import LocalStorage

PARTS: list[dict[str, Any]] = [
    {"a": {"x": np.arange(1000)}, "step": 7},
    {"a": {"y": np.ones((3, 4), np.float16)}},
    {"b": [np.zeros(5), "text"]},
]


def whole() -> dict[str, Any]:
    first, second, third = PARTS
    return {"a": {**first["a"], **second["a"]}, "step": 7, **third}


def save_parts(place: Place) -> dict[str, Any]:
    """Two parts of arrays over all processes, and one too many."""
    place.connect()
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    path = place.directory / "checkpoint"
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    first = jax.jit(lambda: jnp.arange(16.0), out_shardings=sharding)()
    second = jax.jit(lambda: jnp.ones((16, 4), jnp.bfloat16), out_shardings=sharding)()
    partial.save(path, {"a": first, "step": 3})
    partial.save_async(path, {"b": second}).result()
    conflict = ""
    try:
        partial.save(path, {"step": 4})
    except errors.Conflict as error:
        conflict = type(error).__name__
    before = waystation.is_checkpoint(path)
    partial.finalize(path)
    wanted = {
        "a": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding),
        "b": jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=sharding),
        "step": 0,
    }
    loaded = waystation.load(path, wanted)
    pairs = ((loaded["a"], first), (loaded["b"], second))
    same = all(
        np.array_equal(np.asarray(one.data), np.asarray(other.data))
        for ours, theirs in pairs
        for one, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True)
    )
    return {"before": before, "conflict": conflict, "same": same and loaded["step"] == 3}


def die_at(place: Place, point: str) -> None:
    """Saves parts and joins them, and is killed at a point of that."""
    path = place.directory / "checkpoint"

    def die(*_: Any) -> Any:
        place.report("dying")
        os.kill(os.getpid(), signal.SIGKILL)

    partial.save(path, PARTS[0])
    partial.save(path, PARTS[1])
    if point == "part":
        commit.publish_new = die
    partial.save(path, PARTS[2])
    if point == "linking":
        LocalStorage.copy = die
    elif point == "publishing":
        commit.publish_new = die
    elif point == "removing":
        remove_tree = storage.remove_tree
        storage.remove_tree = lambda path: die() if str(path).endswith(".partial_save") else remove_tree(path)
    partial.finalize(path)
