"""What the processes of a torch program do in the tests of local storage, each with a disk of its own: the
directory `disk 0` of process 0, and so on. Each function runs in every process and returns what it saw."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.distributed.torch_scenarios import connect, full_disk, outcome
from tests.support import plain_renames
from tests.support.held_memory import HeldMemory
from tests.support.programs import Place
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import waystation
from waystation.storage.attempts import leftovers

DEADLINE_S = 60.0


@contextlib.contextmanager
def local_storage(**saving: Any) -> Iterator[waystation.Context]:
    """Each process has a storage of its own. Gives the context, for others to begin with."""
    context = waystation.Context()
    context.multiprocessing.primary_host = None
    context.multiprocessing.deadline_s = DEADLINE_S
    for name, value in saving.items():
        setattr(context.array.saving.storage_options, name, value)
    with context:
        yield context


def disk(place: Place, number: int | None = None) -> Path:
    """The disk of a process, by default this one's."""
    return place.directory / f"disk {place.index if number is None else number}"


def listing(directory: Path) -> list[str]:
    """What is on a disk."""
    return sorted(os.listdir(directory)) if directory.exists() else []


def make_state(place: Place, version: int = 1, order: list[int] | None = None) -> dict[str, Any]:
    """A state of sharded, replicated and plain leaves, over a mesh of the processes in some order."""
    mesh = DeviceMesh("cpu", order or list(range(place.count)), mesh_dim_names=("all",))
    table = torch.arange(64 * 48, dtype=torch.float32).reshape(64, 48) + 10_000 * version
    return {
        "rows": sharded(table, mesh, 0),
        "uneven": sharded(table[:37, :5].clone(), mesh, 0),
        "columns": sharded(table.to(torch.bfloat16), mesh, 1),
        "replicated": DTensor.from_local(table * 2, mesh, [Replicate()], run_check=False),
        "plain": table * 3,
        "empty": torch.zeros(0, 3),
        "host": np.arange(5) + place.index,
        "version": version,
        "rank": place.index,
        "long": "ü" * 70_000,
    }


def sharded(table: torch.Tensor, mesh: DeviceMesh, axis: int) -> DTensor:
    """A DTensor by its parts: `distribute_tensor` does not follow the order of a mesh that descends."""
    (coordinate,) = mesh.get_coordinate() or [0]
    local = table.chunk(mesh.size(), axis)[coordinate].contiguous()
    return DTensor.from_local(
        local, mesh, [Shard(axis)], run_check=False, shape=table.shape, stride=table.stride()
    )


def equal(state: dict[str, Any], loaded: dict[str, Any]) -> bool:
    """Whether every leaf is what it was, those that are this process's own too."""
    for key, value in state.items():
        other = loaded[key]
        if hasattr(value, "to_local"):
            same = value.placements == other.placements and torch.equal(value.to_local(), other.to_local())
        elif isinstance(value, torch.Tensor):
            same = torch.equal(value, other)
        else:
            same = bool(np.all(value == other))
        if not same:
            return False
    return True


def round_trip(place: Place) -> dict[str, Any]:
    """Saves and loads in every way; nobody shares anything with anybody."""
    connect(place)
    state = make_state(place)
    path = disk(place) / "checkpoint"
    seen: dict[str, Any] = {}
    with local_storage():
        waystation.save(path, state, custom_metadata={"by": place.index})
        seen["files"] = listing(path / "state")
        seen["as asked"] = equal(state, waystation.load(path, state))
        seen["as saved"] = equal(state, waystation.load_async(path).result())
        newer = make_state(place, 2)
        waystation.save_async(path, newer, overwrite=True).result()
        seen["overwritten"] = equal(newer, waystation.load(path, state))
        seen["left"] = listing(disk(place))
        with local_storage(chunk_bytes=500):
            waystation.save(disk(place) / f"named by {place.index}", state)
        seen["chunks"] = equal(state, waystation.load(disk(place) / f"named by {place.index}", state))
        seen["deleted"] = waystation.delete(path)
        seen["deleted again"] = waystation.delete(path, missing_ok=True)
        seen["missing"] = outcome(lambda: waystation.delete(path))
        seen["left at the end"] = listing(disk(place))
    place.disconnect()
    return seen


def refusals(place: Place) -> dict[str, Any]:
    """One thing after another that cannot be done, none of which may stop the next from working."""
    connect(place)
    state = make_state(place)
    path = disk(place) / "checkpoint"
    one = place.index == 1
    seen: dict[str, Any] = {}
    with local_storage():
        seen["same directory"] = outcome(lambda: waystation.save(place.directory / "shared" / "a", state))
        seen["nowhere"] = outcome(lambda: waystation.load(path))
        seen["left in it"] = listing(place.directory / "shared")
        with full_disk(one):
            seen["full disk"] = outcome(lambda: waystation.save(path, state))
        seen["after it"] = listing(disk(place))
        waystation.save(path, state)
        seen["exists"] = outcome(lambda: waystation.save(path, state))
        columns = sharded(torch.zeros(64, 48), state["rows"].device_mesh, 1)
        turned = {**state, "rows": columns}
        seen["other sharding"] = outcome(lambda: waystation.load(path, turned))
        elsewhere = disk(place) / "elsewhere"
        waystation.save(elsewhere, make_state(place, 2))
        seen["two saves"] = outcome(lambda: waystation.load(elsewhere if one else path))
        if one:
            shutil.rmtree(path)
        seen["one lacks it"] = outcome(lambda: waystation.load(path))
        seen["deleted"] = waystation.delete(path)
    seen["not local"] = outcome(lambda: waystation.load(disk(place, 0) / "elsewhere"))
    with local_storage():
        waystation.save(path, state)
        seen["at last"] = equal(state, waystation.load(path, state))
    place.disconnect()
    return seen


def load_elsewhere(place: Place, moved_ranks: bool) -> Any:
    """Loads with the disks exchanged between the processes, and the mesh with them or not."""
    connect(place)
    order = list(reversed(range(place.count))) if moved_ranks else None
    other = place.count - 1 - place.index
    state = make_state(place, 1, order)
    with local_storage():
        loaded = outcome(lambda: waystation.load(disk(place, other) / "checkpoint", state))
    place.disconnect()
    if not isinstance(loaded, dict):
        return loaded
    return equal({**state, "host": np.arange(5) + other, "rank": other}, loaded)


def one_cannot_commit(place: Place) -> dict[str, Any]:
    """Something takes the name of process 1's part when that is prepared, while process 0 still writes."""
    connect(place)
    path = disk(place) / "checkpoint"
    memory = HeldMemory(48 << 20)  # more than all staging blocks, so that the file is there meanwhile
    data = np.frombuffer(memory.buffer, np.uint8)
    if place.index == 1:
        memory.release()
    seen: dict[str, Any] = {}
    with local_storage() as storage:
        context = waystation.Context(storage)
        context.memory.caller_keeps = True
        with context:
            response = waystation.save_async(path, {"data": data, "rank": place.index})
        if place.index == 1:
            while not list(disk(place).glob("checkpoint.waystation-tmp-*/checkpoint.json")):
                time.sleep(0.01)
            path.mkdir()
            (path / "notes").touch()
            place.report("in the way")
        else:
            place.receive()
            memory.release()
        seen["save"] = outcome(response.result)
        seen["in the way"] = outcome(lambda: waystation.load(path))
        if place.index == 1:
            (path / "notes").unlink()
            path.rmdir()
        loaded = waystation.load(path)
        seen["rank"] = (loaded["rank"], int(loaded["data"].sum()))
        seen["left"] = listing(disk(place))
    place.disconnect()
    return seen


def save_once(place: Place) -> list[str]:
    """Saves version 1."""
    connect(place)
    seen = save_first(place)
    place.disconnect()
    return seen


def save_first(place: Place) -> list[str]:
    """Saves version 1, connected already."""
    with local_storage():
        waystation.save(disk(place) / "checkpoint", make_state(place))
    return listing(disk(place))


def save_until_killed(place: Place, are_plain: bool) -> Any:
    """Saves version 2 over whatever is there, once the test says so; a process may be killed meanwhile."""
    if are_plain:
        plain_renames.allow_only_plain_renames()
    connect(place)
    state = make_state(place, 2)
    place.report("ready")
    place.receive()
    with local_storage():
        return outcome(lambda: waystation.save(disk(place) / "checkpoint", state, overwrite=True))


def come_back(place: Place) -> dict[str, Any]:
    """What a program finds that was killed while it saved, and whether it can go on; connected already."""
    path = disk(place) / "checkpoint"
    seen: dict[str, Any] = {"before": listing(disk(place))}
    with local_storage():
        found = outcome(lambda: waystation.load(path, make_state(place)))
        if isinstance(found, dict):
            version = found["version"]
            seen["found"] = version if equal(make_state(place, version), found) else "a mix"
            seen["strays"] = waystation.verify(path).strays
        else:
            seen["found"] = found.type
        seen["undecided"] = [entry.path for entry in leftovers(str(disk(place))) if entry.undecided]
        third = make_state(place, 3)
        waystation.save(path, third, overwrite=True)
        seen["goes on"] = equal(third, waystation.load(path, third))
        seen["after"] = listing(disk(place))
    seen["strays after"] = waystation.verify(path).strays
    return seen


def serve(place: Place) -> None:
    """Does what the test asks for in one directory after another, and reports what it saw."""
    connect(place)
    while (asked := place.receive()) is not None:
        action, place.directory = asked
        act: Callable[[Place], Any] = {"save": save_first, "come back": come_back}[action]
        place.report(outcome(functools.partial(act, place)))
    place.disconnect()
