"""What the processes of a program do of which only some save and load together. Each function runs in every
process and returns what it saw there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.programs import Place, raised

import waystation
from waystation import training

ACTIVE = {1, 2}
ROWS, COLUMNS = 12, 8
EVERY_STEP = training.save_decision_policies.FixedIntervalPolicy(1)


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns or raises."""
    try:
        return function()
    except Exception as error:
        return raised(error)


def context_of(processes: set[int], primary: int | None, **saving: Any) -> waystation.Context:
    """Options for some of the processes."""
    context = waystation.Context()
    context.multiprocessing.active_processes = processes
    context.multiprocessing.primary_host = primary
    context.multiprocessing.deadline_s = 60
    for name, value in saving.items():
        setattr(context.array.saving, name, value)
    return context


def table(seed: int) -> np.ndarray[Any, Any]:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 1000 * seed


class JaxWorld:
    """A program of JAX, with two devices in each process."""

    def __init__(self, place: Place) -> None:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        place.connect()

    def sharded(self, processes: set[int], seed: int) -> Any:
        """A table whose rows are spread over the devices of some processes."""
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        devices = [device for device in jax.devices() if device.process_index in processes]
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
        return jax.make_array_from_callback((ROWS, COLUMNS), sharding, lambda index: table(seed)[index])

    def everywhere(self, seed: int) -> Any:
        """A table that every device of the program holds."""
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
        return jax.make_array_from_callback((ROWS, COLUMNS), sharding, lambda index: table(seed)[index])

    def check(self, array: Any, seed: int) -> None:
        """Compares what this process holds of a table."""
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), table(seed)[shard.index])


class TorchWorld:
    """A program of torch. Meshes are made by all of its processes."""

    def __init__(self, place: Place) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        torch.set_num_threads(1)
        place.connect()
        self._index = place.index
        groups = [(0,), tuple(ACTIVE), tuple(range(place.count))]
        self._meshes = {processes: DeviceMesh("cpu", list(processes)) for processes in groups}

    def sharded(self, processes: set[int], seed: int) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        members = tuple(sorted(processes))
        share = ROWS // len(members)
        begin = members.index(self._index) * share
        local = torch.from_numpy(table(seed))[begin : begin + share].clone()
        return DTensor.from_local(local, self._meshes[members], [Shard(0)])

    def everywhere(self, seed: int) -> Any:
        return torch.from_numpy(table(seed))

    def check(self, array: Any, seed: int) -> None:
        if not hasattr(array, "to_local"):
            np.testing.assert_array_equal(array.numpy(), table(seed))
            return
        members = array.device_mesh.mesh.tolist()
        share = ROWS // len(members)
        begin = members.index(self._index) * share
        np.testing.assert_array_equal(array.to_local().numpy(), table(seed)[begin : begin + share])


def world_of(place: Place) -> Any:
    return JaxWorld(place) if place.framework == "jax" else TorchWorld(place)


def state(world: Any, place: Place, processes: set[int], seed: int) -> dict[str, Any]:
    return {
        "rows": world.sharded(processes, seed),
        "everywhere": world.everywhere(seed + 1),
        "own": np.full(3, place.index),
        "step": seed,
    }


def check(world: Any, loaded: dict[str, Any], seed: int, primary: int) -> None:
    world.check(loaded["rows"], seed)
    world.check(loaded["everywhere"], seed + 1)
    assert loaded["own"].tolist() == [primary] * 3
    assert loaded["step"] == seed


def work(place: Place, root: Path) -> dict[str, Any]:
    """Processes 1 and 2 do everything together; process 0 meanwhile does the same alone."""
    world = world_of(place)
    is_active = place.index in ACTIVE
    processes, primary = (ACTIVE, 1) if is_active else ({0}, 0)
    below = root / ("pair" if is_active else "alone")
    seen: dict[str, Any] = {}
    with context_of(processes, primary):
        waystation.save(below / "one", state(world, place, processes, 5))
        abstract = state(world, place, processes, 0)
        check(world, waystation.load(below / "one", abstract), 5, primary)
        waystation.save_async(below / "two", state(world, place, processes, 6)).result()
        check(world, waystation.load_async(below / "two", abstract).result(), 6, primary)
        waystation.save(below / "two", state(world, place, processes, 7), overwrite=True)
        check(world, waystation.load(below / "two", abstract), 7, primary)
        seen["names"] = waystation.metadata(below / "two").checkpointable_names
        seen["deleted"] = waystation.delete(below / "two")
        asyncio.run(waystation.multihost.sync_global_processes("here", operation_id="1", processes=processes))
        with training.Checkpointer(below / "steps", save_decision_policy=EVERY_STEP) as checkpointer:
            for step in range(3):
                checkpointer.save(step, state(world, place, processes, step))
            check(world, checkpointer.load(None, abstract), 2, primary)
            check(world, checkpointer.load_async(1, abstract).result(), 1, primary)
            seen["steps"] = [info.step for info in checkpointer.checkpoints]
    with context_of(processes, primary, use_ocdbt=True):
        waystation.save(below / "ocdbt", state(world, place, processes, 8))
        check(world, waystation.load(below / "ocdbt", abstract), 8, primary)
    with context_of(processes, None):
        own = place.directory / f"disk {place.index}" / "checkpoint"
        waystation.save(own, state(world, place, processes, 9))
        check(world, waystation.load(own, abstract), 9, place.index)
    # All of them together are in step with each other all the same.
    waystation.save(root / "all", state(world, place, set(range(place.count)), 10))
    check(world, waystation.load(root / "all", state(world, place, set(range(place.count)), 0)), 10, 0)
    place.disconnect()
    return seen


def end_together() -> None:
    """Process 0 has the store that the others talk through."""
    asyncio.run(waystation.multihost.sync_global_processes("the end", operation_id="2"))


def load_as_saved(place: Place, path: Path) -> Any:
    """Loads without an abstract state, in a program that has made no meshes."""
    torch.set_num_threads(1)
    place.connect()
    found = None
    if place.index in ACTIVE:
        with context_of(ACTIVE, 1):
            found = outcome(lambda: waystation.load(path))
    end_together()
    place.disconnect()
    return found


def refuse(place: Place, root: Path) -> dict[str, Any]:
    """Calls that cannot be what was meant."""
    world = world_of(place)
    every = set(range(place.count))
    spread, own = world.sharded(every, 1), np.ones(2)
    seen: dict[str, Any] = {}
    with context_of(ACTIVE, 0):
        seen["primary"] = outcome(lambda: waystation.save(root / "a", {"own": own}))
    with context_of(ACTIVE, 1):
        if place.index not in ACTIVE:
            seen["outside"] = outcome(lambda: waystation.save(root / "a", {"own": own}))
        else:
            seen["spread"] = outcome(lambda: waystation.save(root / "a", {"own": own, "spread": spread}))
            differing = {"own": own, f"by {place.index}": own}
            seen["different"] = outcome(lambda: waystation.save(root / "a", differing))
            seen["nothing left"] = not root.exists() or os.listdir(root) == []
    with context_of({0, 99}, 0):
        seen["unknown"] = outcome(lambda: waystation.load(root / "a"))
    end_together()
    place.disconnect()
    return seen
