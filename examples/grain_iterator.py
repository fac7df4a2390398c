"""Grain: the position in the data is part of the checkpoint. Run it twice: no example comes twice.

    python examples/grain_iterator.py checkpoint --steps 20

A Grain iterator saves and restores itself, so it stands beside the state as a checkpointable of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

import waystation

State = dict[str, jax.Array]


def examples() -> Any:
    """Batches of shuffled numbers, without end."""
    numbers = (
        grain.MapDataset.range(1000).shuffle(seed=7).repeat().map(lambda number: np.float32(number) / 1000)
    )
    return iter(numbers.to_iter_dataset().batch(16))


@jax.jit
def train_step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    """The slope learns to be two."""
    loss, gradient = jax.value_and_grad(lambda slope: jnp.mean((slope * batch - 2 * batch) ** 2))(
        state["slope"]
    )
    return {"slope": state["slope"] - 0.5 * gradient, "step": state["step"] + 1}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on a Grain dataset, and resumes when run again.")
    parser.add_argument("path", type=Path, help="the checkpoint")
    parser.add_argument("--steps", type=int, default=20, help="last step (default 20)")
    arguments = parser.parse_args()
    state = {"slope": jnp.float32(0), "step": jnp.int32(0)}
    data = examples()
    if waystation.is_checkpoint(arguments.path):
        wanted = {"state": jax.eval_shape(lambda: state), "data": data}
        state = waystation.load_checkpointables(arguments.path, wanted)["state"]
    for step in range(int(state["step"]) + 1, arguments.steps + 1):
        state, loss = train_step(state, next(data))
        print(f"step {step} loss {float(loss):.9f}")
    waystation.save_checkpointables(arguments.path, {"state": state, "data": data}, overwrite=True)


if __name__ == "__main__":
    main()
