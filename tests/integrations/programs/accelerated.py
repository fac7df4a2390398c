"""Trains by accelerate, which keeps all that it has prepared in a directory for each epoch."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import re
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

directory, steps = sys.argv[1], int(sys.argv[2])
loading = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=loading)
set_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8], 0.5)
numbers = torch.utils.data.TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))
loader = torch.utils.data.DataLoader(numbers, batch_size=4, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)


class Progress:
    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
names = os.listdir(directory) if os.path.isdir(directory) else []
saved = sorted(int(name[6:]) for name in names if re.fullmatch(r"epoch-\d+", name))
if saved:
    accelerator.load_state(os.path.join(directory, f"epoch-{saved[-1]}"))

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
    accelerator.save_state(os.path.join(directory, f"epoch-{progress.epoch}"))

state = accelerator.unwrap_model(model).state_dict() | {
    f"{number}.{name}": value
    for number, moments in optimizer.state_dict()["state"].items()
    for name, value in moments.items()
}
data = b"".join(state[name].numpy().tobytes() for name in sorted(state))
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
