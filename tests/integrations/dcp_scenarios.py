"""What the processes of programs that use `torch.distributed.checkpoint` do in the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as genuine
from tests.distributed.torch_scenarios import connect
from tests.support.programs import Place
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import waystation.integrations.dcp as dcp
from waystation.errors import StructureMismatch


class App:
    """A model and its optimizer, as torch's tutorial saves them: it is a `Stateful`."""

    def __init__(self, seed: int, count: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
        mesh = init_device_mesh("cpu", (count,))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps = 0

    def train(self, steps: int) -> None:
        """Trains on data that depend on the step alone."""
        for _ in range(steps):
            torch.manual_seed(100 + self.steps)
            loss = self.model(torch.randn(4, 6)).square().sum()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.steps = state["steps"]

    def whole(self) -> dict[str, np.ndarray[Any, Any]]:
        """The parameters, gathered."""
        return {name: value.full_tensor().numpy() for name, value in self.model.state_dict().items()}


def train_and_save(place: Place, steps: int, by: str, way: str) -> dict[str, np.ndarray[Any, Any]]:
    """Trains and saves; returns the parameters of a run that goes on for two more steps."""
    connect(place)
    app = App(1, place.count)
    app.train(steps)
    library: Any = genuine if by == "torch" else dcp
    state, target = {"app": app}, str(place.directory / "step")
    if way == "save":
        library.save(state, checkpoint_id=target)
    else:
        future = library.async_save(state, storage_writer=genuine.FileSystemWriter(target))
        app.train(1)
        future.result()
        app.steps -= 1
        library.load({"app": app}, checkpoint_id=target)
    app.train(2)
    whole = app.whole()
    dist.barrier()
    place.disconnect()
    return whole


def resume(place: Place) -> tuple[int, dict[str, np.ndarray[Any, Any]]]:
    """Loads what another number of processes has saved, and trains two steps."""
    connect(place)
    app = App(2, place.count)
    dcp.load({"app": app}, checkpoint_id=place.directory / "step")
    loaded = app.steps
    app.train(2)
    whole = app.whole()
    dist.barrier()
    place.disconnect()
    return loaded, whole


def some_save(place: Place) -> list[Any]:
    """The last two processes save and load in their group; each saves and loads alone."""
    connect(place)
    members = [place.count - 2, place.count - 1]
    group = dist.new_group(members)
    seen: list[Any] = []
    if place.index in members:
        state = {"w": torch.full((4,), float(members[0])), "n": 3}
        dcp.save(state, checkpoint_id=place.directory / "group", process_group=group)
        wanted = {"w": torch.zeros(4), "n": 0}
        dcp.load(wanted, checkpoint_id=place.directory / "group", process_group=group)
        seen.append((wanted["w"].tolist(), wanted["n"]))
    own = place.directory / f"own-{place.index}"
    dcp.save({"w": torch.full((2,), float(place.index))}, checkpoint_id=own, no_dist=True)
    wanted = {"w": torch.zeros(2)}
    dcp.load(wanted, checkpoint_id=own, no_dist=True)
    seen.append(wanted["w"].tolist())
    dist.barrier()
    place.disconnect()
    return seen


def pipeline(place: Place, by: str, asynchronous: bool) -> dict[str, Any]:
    """Two pipeline stages, each on two processes: every process saves the keys of its stage, and a key of its
    own.

    Loads it all again, into stages that are the other way round, and returns what has come.
    """
    connect(place)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, data = mesh["stage"].get_local_rank(), mesh["data"]
    library: Any = genuine if by == "torch" else dcp
    state = _stage(stage, data, filled=True)
    state["loaders"] = {f"rank_{place.index}": bytes([place.index]) * (70_000 if place.index == 3 else 3)}
    state["step"] = 7
    path = place.directory / "stages"
    if asynchronous:
        library.async_save(state, checkpoint_id=path).result()
    else:
        library.save(state, checkpoint_id=path)
    wanted = _stage(1 - stage, data, filled=False)
    wanted["loaders"] = {f"rank_{place.index}": b""}
    wanted["step"] = 0
    library.load(wanted, checkpoint_id=path)
    loaded = {name: value.full_tensor().numpy() for name, value in wanted["model"].items()}
    seen = {
        "model": loaded,
        "counter": wanted[f"counter_{1 - stage}"].tolist(),
        "loader": wanted["loaders"][f"rank_{place.index}"],
        "step": wanted["step"],
    }
    dist.barrier()
    place.disconnect()
    return seen


def _stage(stage: int, data: Any, *, filled: bool) -> dict[str, Any]:
    """What the processes of a stage have: sharded parameters, and a plain tensor."""
    torch.manual_seed(stage)
    layers = {f"layers.{stage * 2 + number}.weight": torch.randn(5, 3) for number in range(2)}
    model = {
        name: distribute_tensor(value if filled else torch.zeros_like(value), data, [Shard(0)])
        for name, value in layers.items()
    }
    return {"model": model, f"counter_{stage}": torch.full((2,), stage + 1 if filled else 0)}


def other_tensors_at_one_key(place: Place) -> str:
    """Processes with other keys, and other shapes at one of them; what is raised, and who says so."""
    connect(place)
    state = {"part": {"w": torch.zeros(2 + place.index), f"own_{place.index}": place.index}}
    try:
        dcp.save(state, checkpoint_id=place.directory / "other")
        said = "nothing"
    except StructureMismatch as error:
        said = str(error)
    dist.barrier()
    place.disconnect()
    return said


def differ_at_one_key(place: Place) -> list[float]:
    """A save of a large tensor that differs from process to process; the values that are there then."""
    connect(place)
    dcp.save({"w": torch.full((1 << 20,), float(place.index))}, checkpoint_id=place.directory / "c")
    wanted = {"w": torch.full((1 << 20,), -1.0)}
    dcp.load(wanted, checkpoint_id=place.directory / "c")
    place.disconnect()
    return [float(value) for value in wanted["w"].unique()]


def missing_in_one(place: Place) -> list[str]:
    """A load in which one process asks for what is not there: all raise."""
    connect(place)
    dcp.save({"a": torch.ones(2), "b": 3}, checkpoint_id=place.directory / "c")
    wanted: dict[str, Any] = {"a": torch.zeros(2)} if place.index else {"missing": torch.zeros(2)}
    try:
        dcp.load(wanted, checkpoint_id=place.directory / "c")
        said = ["nothing"]
    except StructureMismatch as error:
        said = ["mismatch", str(error.context.get("process"))]
    dist.barrier()
    place.disconnect()
    return said
