"""What the processes of a torch program do while a test watches which files they touch."""

from __future__ import annotations

import torch
from tests.distributed.torch_scenarios import connect
from tests.support.programs import Place
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
