"""Flax NNX: the model and its optimizer are one checkpoint. Run it twice: it goes on where it was.

    python examples/flax_nnx.py checkpoint --steps 20

NNX keeps state inside of the objects. `nnx.state` takes it out for the save; for the load, `nnx.eval_shape`
makes the objects without their arrays, and `nnx.update` puts the arrays in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import waystation


class Sorter(nnx.Module):
    """Sorts eight numbers, more or less."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.expand = nnx.Linear(8, 64, rngs=rngs)
        self.contract = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, numbers: jax.Array) -> jax.Array:
        return self.contract(nnx.relu(self.expand(numbers)))


class Training(nnx.Module):
    """All that a step changes."""

    def __init__(self) -> None:
        self.model = Sorter(nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(1e-2), wrt=nnx.Param)


def restored(path: Path) -> Training:
    """The training as it was saved; nothing of it is computed first."""
    training = nnx.eval_shape(Training)
    nnx.update(training, waystation.load(path, nnx.state(training)))
    return training


@nnx.jit
def train_step(training: Training, key: jax.Array) -> jax.Array:
    numbers = jax.random.uniform(key, (64, 8))

    def loss_of(model: Sorter) -> jax.Array:
        return jnp.mean((model(numbers) - jnp.sort(numbers)) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(training.model)
    training.optimizer.update(training.model, gradients)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a Flax NNX model, and resumes when run again.")
    parser.add_argument("path", type=Path, help="the checkpoint")
    parser.add_argument("--steps", type=int, default=20, help="last step (default 20)")
    arguments = parser.parse_args()
    training = restored(arguments.path) if waystation.is_checkpoint(arguments.path) else Training()
    for step in range(int(training.optimizer.step[...]) + 1, arguments.steps + 1):
        loss = train_step(training, jax.random.key(step))
        print(f"step {step} loss {float(loss):.9f}")
    waystation.save(arguments.path, nnx.state(training), overwrite=True)


if __name__ == "__main__":
    main()
