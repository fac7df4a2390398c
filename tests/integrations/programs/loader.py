"""Trains on a `StatefulDataLoader` of torchdata with workers: the place in the data is part of the
checkpoint."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import sys

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

path, steps = os.path.join(sys.argv[1], "newest"), int(sys.argv[2])
os.makedirs(sys.argv[1], exist_ok=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
numbers = torch.utils.data.TensorDataset(torch.randn(40, 8))
loader = StatefulDataLoader(numbers, batch_size=4, shuffle=True, num_workers=2)
step = 0
if os.path.exists(path):
    state = torch.load(path, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["generator"])
    step = state["step"]

while step < steps:
    for (batch,) in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "generator": torch.get_rng_state(),
            "step": step,
        }
        torch.save(state, path)
        print("step", step, flush=True)
        if step == steps:
            break

data = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
