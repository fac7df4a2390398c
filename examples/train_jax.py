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

from waystation.path.step import standard_name_format
from waystation.training import Checkpointer, preservation_policies, save_decision_policies

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


def start_or_resume(checkpointer: Checkpointer, seed: int, mesh: Mesh) -> State:
    wanted = abstract_state(seed, mesh)
    if checkpointer.latest is not None:
        print(f"resuming from {checkpointer.latest.path} on {mesh.size} devices")
        return checkpointer.load(None, wanted)
    print(f"starting on {mesh.size} devices")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    return jax.jit(partial(initial_state, seed), out_shardings=shardings)()


def train(directory: Path, steps: int, save_every: int, seed: int) -> None:
    # The most devices that the width can be split over evenly.
    devices = jax.devices()[: 1 << (jax.device_count().bit_length() - 1)]
    mesh = jax.make_mesh((len(devices),), ("model",), (jax.sharding.AxisType.Auto,), devices=devices)
    # When the block ends, the last save has; one that has failed raises at the next, or there.
    with Checkpointer(
        directory,
        save_decision_policy=save_decision_policies.FixedIntervalPolicy(save_every),
        preservation_policy=preservation_policies.LatestN(KEPT_CHECKPOINTS),
        step_name_format=standard_name_format(step_prefix="step", step_format_fixed_length=8),
    ) as checkpointer:
        state = start_or_resume(checkpointer, seed, mesh)
        for step in range(int(state["step"]) + 1, steps + 1):
            state, loss = train_step(state)
            # The next step donates the state, which is safe as soon as this returns.
            saving = checkpointer.save_async(step, state, force=step == steps)
            if saving is not None:
                print(f"step {step} loss {float(loss):.9f}")


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
