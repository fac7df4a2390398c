"""A JAX training loop that survives being stopped: run it, stop it anywhere, run it again.

    python examples/train_jax.py run --steps 500

It resumes from the newest whole checkpoint in the directory, on whatever devices there are then; try it with
another number of them:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/train_jax.py run

Everything that decides what the program does next is in the state: parameters, optimizer, step, random key.
So a run that was stopped and resumed on the same devices gives the losses of one that was not.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import waystation

WIDTH = 256
BATCH = 64
KEPT_CHECKPOINTS = 3

State = dict[str, Any]
optimizer = optax.adamw(1e-3)


def initial_state(seed: int) -> State:
    first_key, second_key, key = jax.random.split(jax.random.key(seed), 3)
    parameters = {
        "expand": jax.random.normal(first_key, (8, WIDTH)) / 8**0.5,
        "contract": jax.random.normal(second_key, (WIDTH, 8)) / WIDTH**0.5,
    }
    return {
        "parameters": parameters,
        "optimizer": optimizer.init(parameters),
        "step": jnp.int32(0),
        "key": key,
    }


def abstract_state(seed: int, mesh: Mesh) -> State:
    """Shapes, dtypes and shardings of the state. Nothing is computed and no memory is used."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Split along the axis that has the width; what has none is on every device.
        names = ["model" if extent == WIDTH else None for extent in leaf.shape]
        return leaf.update(sharding=NamedSharding(mesh, PartitionSpec(*names)))

    return jax.tree.map(place, jax.eval_shape(partial(initial_state, seed)))


def loss_of(parameters: State, key: jax.Array) -> jax.Array:
    """The network learns to sort eight numbers."""
    numbers = jax.random.uniform(key, (BATCH, 8))
    hidden = jax.nn.relu(numbers @ parameters["expand"])
    return jnp.mean((hidden @ parameters["contract"] - jnp.sort(numbers)) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: State) -> tuple[State, jax.Array]:
    key, batch_key = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(loss_of)(state["parameters"], batch_key)
    updates, moments = optimizer.update(gradients, state["optimizer"], state["parameters"])
    parameters = optax.apply_updates(state["parameters"], updates)
    return {"parameters": parameters, "optimizer": moments, "step": state["step"] + 1, "key": key}, loss


def checkpoints(directory: Path) -> list[Path]:
    """The committed checkpoints, oldest first. What a killed save has left is not among them."""
    return sorted(path for path in directory.glob("step_*") if waystation.is_checkpoint(path))


def start_or_resume(directory: Path, seed: int, mesh: Mesh) -> State:
    wanted = abstract_state(seed, mesh)
    found = checkpoints(directory)
    if found:
        print(f"resuming from {found[-1]} on {mesh.size} devices")
        return waystation.load(found[-1], wanted)
    print(f"starting on {mesh.size} devices")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    return jax.jit(partial(initial_state, seed), out_shardings=shardings)()


def train(directory: Path, steps: int, save_every: int, seed: int) -> None:
    # The most devices that the width can be split over evenly.
    devices = jax.devices()[: 1 << (jax.device_count().bit_length() - 1)]
    mesh = jax.make_mesh((len(devices),), ("model",), (jax.sharding.AxisType.Auto,), devices=devices)
    state = start_or_resume(directory, seed, mesh)
    saving = None
    for step in range(int(state["step"]) + 1, steps + 1):
        state, loss = train_step(state)
        if step % save_every and step != steps:
            continue
        print(f"step {step} loss {float(loss):.9f}")
        if saving is not None:
            saving.result()  # one save at a time; raises if that one failed
        # The next step donates the state, which is safe as soon as this returns.
        saving = waystation.save_async(directory / f"step_{step:08}", state)
        for old in checkpoints(directory)[:-KEPT_CHECKPOINTS]:
            waystation.delete(old)
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
