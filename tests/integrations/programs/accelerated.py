"""Trains by accelerate, which keeps all that it has prepared in a directory for each epoch.

With `fsdp` as third argument the model is sharded by FSDP2.
"""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import re
import sys

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from torch.distributed.tensor import DTensor

directory, steps = sys.argv[1], int(sys.argv[2])
loading = DataLoaderConfiguration(use_seedable_sampler=True)
plugin = None
if sys.argv[3:] == ["fsdp"]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=99
    )
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, dataloader_config=loading, fsdp_plugin=plugin
)
if plugin is not None and not accelerator.is_fsdp2:
    # On CPUs Accelerate passes over the plugin without a word, and would train by DDP.
    for state in (PartialState(), accelerator.state):
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
set_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], 0.5)
numbers = torch.utils.data.TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))
loader = torch.utils.data.DataLoader(numbers, batch_size=4, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
assert plugin is None or all(isinstance(parameter, DTensor) for parameter in model.parameters())


class Progress:
    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def digest():
    """What tells the parameters and moments from others, whatever devices hold them."""
    tensors = accelerator.unwrap_model(model).state_dict() | {
        f"{number}.{name}": value
        for number, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
    }
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.numpy().tobytes())
    return found.hexdigest()


progress = Progress()
accelerator.register_for_checkpointing(progress)
names = os.listdir(directory) if os.path.isdir(directory) else []
saved = sorted(int(name[6:]) for name in names if re.fullmatch(r"epoch-\d+", name))
if saved:
    accelerator.load_state(os.path.join(directory, f"epoch-{saved[-1]}"))
    print("loaded", progress.epoch, digest(), flush=True)

while progress.epoch < steps // 2:
    loader.set_epoch(progress.epoch)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print("batch of epoch", progress.epoch, flush=True)
    progress.epoch += 1
    print("epoch", progress.epoch, digest(), flush=True)
    accelerator.save_state(os.path.join(directory, f"epoch-{progress.epoch}"))
print("digest", digest(), flush=True)
