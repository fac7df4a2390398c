"""What the processes of a program do that loads a checkpoint while others overwrite it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from tests.support.programs import Place

import waystation
from waystation.errors import CheckpointNotFound

LOADS = 6


def ways(framework: str) -> list[str]:
    """How a program of this framework loads."""
    return [way for way in _WAYS if way != "broadcast" or framework == "jax"]


def load(place: Place) -> list[tuple[str, int | None]]:
    """Loads again and again in several ways, in every process; checks that each load is of one version.

    Returns:
        The way of each load and the number of the version, None of one that was not there.
    """
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    place.connect()
    path = place.directory / "same"
    found: list[tuple[str, int | None]] = []
    for _ in range(LOADS):
        for way in ways(place.framework):
            if place.index == 0:
                place.report(way)
            try:
                found.append((way, _checked(_WAYS[way](path))))
            except CheckpointNotFound:
                found.append((way, None))
    place.disconnect()
    return found


def _checked(state: dict[str, Any]) -> int:
    number = int(state["number"])
    assert all((np.asarray(array) == number).all() for array in [state["large"], *state["small"]])
    return number


def _background(path: Any) -> Any:
    return waystation.load_async(path).result()


def _unverified(path: Any) -> Any:
    context = waystation.Context()
    context.array.loading.verify = False
    with context:
        return waystation.load(path)


def _checkpointables(path: Any) -> Any:
    return waystation.load_checkpointables(path)["state"]


def _broadcast(path: Any) -> Any:
    """Replicated arrays of JAX, of which one process reads each and sends it."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec())
    abstract = {
        "number": np.empty((), np.int64),
        "large": jax.ShapeDtypeStruct((200_000,), np.int32, sharding=sharding),
        "small": [jax.ShapeDtypeStruct((1000,), np.int32, sharding=sharding) for _ in range(50)],
    }
    context = waystation.Context()
    context.array.loading.load_and_broadcast = True
    with context:
        loaded = waystation.load(path, abstract)
    number = loaded.pop("number")
    here = jax.tree.map(lambda array: np.asarray(array.addressable_data(0)), loaded)
    return {"number": number, **here}


_WAYS = {
    "load": waystation.load,
    "background": _background,
    "unverified": _unverified,
    "checkpointables": _checkpointables,
    "broadcast": _broadcast,
}
