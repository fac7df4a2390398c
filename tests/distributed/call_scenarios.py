"""Calls of the processes of a program, while a test watches which files they touch, or what they raise."""

from __future__ import annotations

from typing import Any

import torch
from tests.distributed.torch_scenarios import connect
from tests.support.programs import Place, raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import waystation

ROWS_A_PROCESS = 16


def save(place: Place, path: str, layout: str) -> None:
    """Saves an array of which each process has a part."""
    connect(place)
    mesh = init_device_mesh("cpu", (place.count,), mesh_dim_names=("all",))
    context = waystation.Context()
    context.array.saving.use_ocdbt = None if layout == "native" else layout == "ocdbt"
    with context:
        table = torch.arange(place.count * ROWS_A_PROCESS * 8, dtype=torch.float32).reshape(-1, 8)
        waystation.save(path, {"table": distribute_tensor(table, mesh, [Shard(0)])})


def act(place: Place, action: str, is_local: bool) -> None:
    """Saves, loads or deletes a checkpoint of which each process has as much however many they are."""
    connect(place)
    mesh = init_device_mesh("cpu", (place.count,), mesh_dim_names=("all",))
    table = torch.arange(place.count * ROWS_A_PROCESS * 8, dtype=torch.float32).reshape(-1, 8)
    state = {f"rows {number}": distribute_tensor(table + number, mesh, [Shard(0)]) for number in range(3)}
    path = place.directory / "disks" / (f"disk {place.index}/checkpoint" if is_local else "checkpoint")
    context = waystation.Context()
    if is_local:
        context.multiprocessing.primary_host = None
    place.report("ready")
    place.receive()
    with context:
        if action == "save":
            waystation.save(path, state)
        elif action == "load":
            loaded = waystation.load(path, state)
            assert all(torch.equal(loaded[name].to_local(), state[name].to_local()) for name in state)
        else:
            assert waystation.delete(path)
    place.disconnect()


def out_of_step(place: Place) -> list[Any]:
    """Process 1 loads an earlier checkpoint where the others save; then all save, and load."""
    place.connect()
    waystation.save(place.directory / "0", {"step": 0, "w": torch.arange(4.0)})
    seen: list[Any] = []
    for step in (1, 2):
        try:
            if place.index == 1:
                waystation.load(place.directory / "0")
            else:
                waystation.save(place.directory / str(step), {"step": step})
        except Exception as error:  # as a program does that logs it and goes on
            seen.append(raised(error))
    waystation.save_async(place.directory / "3", {"step": 3}).result()
    seen.append(waystation.load(place.directory / "3")["step"])
    place.report("done")
    place.receive()
    return seen
