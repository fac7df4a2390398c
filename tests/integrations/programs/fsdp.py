"""Trains as TorchTitan does: FSDP2 and tensor parallelism on a mesh, wrappers that are `Stateful`, a data
loader for each rank of data parallelism, and one asynchronous save at a time. Started by torchrun.
"""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import pickle
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

directory, steps, tensor_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
mesh = init_device_mesh(
    "cpu", (dist.get_world_size() // tensor_parallel, tensor_parallel), mesh_dim_names=("data", "model")
)
group = dist.new_group(backend="gloo")  # of the saves, beside the group of training


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 24)
        self.down = torch.nn.Linear(24, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


torch.manual_seed(0)
model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(8, 1))
for block in model[:2]:
    if tensor_parallel > 1:
        parallelize_module(block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


class Model(Stateful):
    def state_dict(self):
        return get_model_state_dict(model)

    def load_state_dict(self, state):
        set_model_state_dict(model, state, options=StateDictOptions(strict=False))


class Optimizer(Stateful):
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self):
        return get_optimizer_state_dict(model, optimizer, options=self.options)

    def load_state_dict(self, state):
        set_optimizer_state_dict(model, optimizer, state, options=self.options)


class Loader(Stateful):
    """Gives each rank of data parallelism its part of every batch, and keeps its place under a key of its
    own."""

    def __init__(self, rank, count):
        self.rank, self.count, self.position = rank, count, 0

    def __next__(self):
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        return torch.randn(8, 8, generator=generator).chunk(self.count)[self.rank]

    def state_dict(self):
        return {f"dp_rank_{self.rank}": pickle.dumps({"position": self.position}), "world_size": self.count}

    def load_state_dict(self, state):
        self.position = pickle.loads(state[f"dp_rank_{self.rank}"])["position"]


class Progress(Stateful):
    def __init__(self):
        self.step, self.losses = 0, []

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": self.losses}

    def load_state_dict(self, state):
        self.step, self.losses = int(state["step"]), state["losses"]


def digest():
    """What tells the parameters and moments from others, whatever devices hold them."""
    found = hashlib.sha256()
    for state in (get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)["state"]):
        tensors, _ = torch.utils._pytree.tree_flatten(state)
        for tensor in tensors:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(whole.numpy().tobytes())
    return found.hexdigest()


def tell(*words):
    if dist.get_rank() == 0:
        print(*words, flush=True)


def path_of(step):
    return os.path.join(directory, f"step-{step}")


def saved_steps():
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = [int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit()]
    return sorted(step for step in found if os.path.isfile(os.path.join(path_of(step), ".metadata")))


progress, loader = Progress(), Loader(mesh["data"].get_local_rank(), mesh["data"].size())
state = {
    "model": Model(),
    "optimizer": Optimizer(),
    "lr_scheduler": schedule,
    "dataloader": loader,
    "train_state": progress,
}
saved = [saved_steps()] if dist.get_rank() == 0 else [None]
dist.broadcast_object_list(saved, 0)
if saved[0]:
    loaded = dict(state)
    if len(sys.argv) > 4:  # the name of what another number of processes cannot load
        del loaded[sys.argv[4]]
    dcp.load(loaded, checkpoint_id=path_of(saved[0][-1]))
    loader.position = progress.step
    tell("loaded", progress.step, digest())

saving = None
while progress.step < steps:
    loss = model(next(loader)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    progress.step += 1
    progress.losses.append(loss.item())
    if saving is not None:
        saving.result()
    if dist.get_rank() == 0:
        for step in saved_steps()[:-2]:
            shutil.rmtree(path_of(step))
    tell("step", progress.step, digest())
    saving = dcp.async_save(state, checkpoint_id=path_of(progress.step), process_group=group)
saving.result()
tell("end", digest())
dist.destroy_process_group()
