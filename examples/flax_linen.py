"""Flax Linen: a `TrainState` is saved and loaded as it is. Run it twice: it goes on where it was.

    python examples/flax_linen.py checkpoint --steps 20

The functions in a `TrainState` (`apply_fn`, `tx`) are not stored: they come from the abstract state, which is
made by the code that made the first state.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import waystation


class Sorter(nn.Module):
    """Sorts eight numbers, more or less."""

    @nn.compact
    def __call__(self, numbers: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.relu(nn.Dense(64)(numbers)))


MODEL = Sorter()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def initial_state() -> TrainState:
    parameters = MODEL.init(jax.random.key(0), jnp.zeros((1, 8)))
    return TrainState.create(apply_fn=MODEL.apply, params=parameters, tx=OPTIMIZER)


@jax.jit
def train_step(state: TrainState, key: jax.Array) -> tuple[TrainState, jax.Array]:
    numbers = jax.random.uniform(key, (64, 8))

    def loss_of(parameters: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(parameters, numbers) - jnp.sort(numbers)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a Flax Linen model, and resumes when run again.")
    parser.add_argument("path", type=Path, help="the checkpoint")
    parser.add_argument("--steps", type=int, default=20, help="last step (default 20)")
    arguments = parser.parse_args()
    if waystation.is_checkpoint(arguments.path):
        state = waystation.load(arguments.path, jax.eval_shape(initial_state))
    else:
        state = jax.tree.map(jnp.asarray, initial_state())
    for step in range(int(state.step) + 1, arguments.steps + 1):
        state, loss = train_step(state, jax.random.key(step))
        print(f"step {step} loss {float(loss):.9f}")
    waystation.save(arguments.path, state, overwrite=True)


if __name__ == "__main__":
    main()
