"""A PyTorch training loop that survives being stopped: run it, stop it anywhere, run it again.

    python examples/train_torch.py run --steps 500

The optimizer changes parameters in place, so `save_async` copies CPU tensors before it returns: the
checkpoint holds the values of that moment. The state of the random generator is saved too, so a run that was
stopped and resumed gives the losses of one that was not.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import waystation

BATCH = 64


class Trainer:
    """Everything that decides what the program does next."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]

    def train_step(self) -> float:
        """The network learns to sort eight numbers."""
        numbers = torch.rand(BATCH, 8)
        loss = nn.functional.mse_loss(self.model(numbers), numbers.sort().values)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()


def newest_checkpoint(directory: Path) -> Path | None:
    """The last committed checkpoint. What a killed save has left is not one."""
    return max((path for path in directory.glob("step_*") if waystation.is_checkpoint(path)), default=None)


def train(directory: Path, steps: int, save_every: int, seed: int) -> None:
    trainer = Trainer(seed)
    newest = newest_checkpoint(directory)
    if newest is not None:
        print(f"resuming from {newest}")
        trainer.restore(waystation.load(newest))
    saving = None
    while trainer.step < steps:
        loss = trainer.train_step()
        if trainer.step % save_every and trainer.step != steps:
            continue
        print(f"step {trainer.step} loss {loss:.9f}")
        if saving is not None:
            saving.result()  # one save at a time; raises if that one failed
        saving = waystation.save_async(directory / f"step_{trainer.step:08}", trainer.state())
    if saving is not None:
        saving.result()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a network to sort, and resumes when run again.")
    parser.add_argument("directory", type=Path, help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=1000, help="last step (default 1000)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between saves (default 50)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.directory, arguments.steps, arguments.save_every, arguments.seed)


if __name__ == "__main__":
    main()
