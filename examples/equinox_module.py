"""Equinox: a module is a tree, functions and all. Run it twice: it goes on where it was.

    python examples/equinox_module.py checkpoint --steps 20

`eqx.partition` separates the arrays of a module, which are saved, from the rest, which the code makes anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import waystation

OPTIMIZER = optax.adamw(1e-2)
State = dict[str, Any]


def initial_state() -> State:
    model = eqx.nn.MLP(8, 8, width_size=64, depth=1, key=jax.random.key(0))
    moments = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    return {"model": model, "moments": moments, "step": jnp.int32(0)}


def restored(path: Path) -> State:
    """The state as it was saved; nothing of it is computed first."""
    abstract, rest = eqx.partition(
        eqx.filter_eval_shape(initial_state), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    return eqx.combine(waystation.load(path, abstract), rest)


@eqx.filter_jit
def train_step(state: State, key: jax.Array) -> tuple[State, jax.Array]:
    numbers = jax.random.uniform(key, (64, 8))

    def loss_of(model: eqx.Module) -> jax.Array:
        return jnp.mean((jax.vmap(model)(numbers) - jnp.sort(numbers)) ** 2)

    loss, gradients = eqx.filter_value_and_grad(loss_of)(state["model"])
    arrays = eqx.filter(state["model"], eqx.is_inexact_array)
    updates, moments = OPTIMIZER.update(gradients, state["moments"], arrays)
    model = eqx.apply_updates(state["model"], updates)
    return {"model": model, "moments": moments, "step": state["step"] + 1}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains an Equinox model, and resumes when run again.")
    parser.add_argument("path", type=Path, help="the checkpoint")
    parser.add_argument("--steps", type=int, default=20, help="last step (default 20)")
    arguments = parser.parse_args()
    state = restored(arguments.path) if waystation.is_checkpoint(arguments.path) else initial_state()
    for step in range(int(state["step"]) + 1, arguments.steps + 1):
        state, loss = train_step(state, jax.random.key(step))
        print(f"step {step} loss {float(loss):.9f}")
    waystation.save(arguments.path, eqx.filter(state, eqx.is_array), overwrite=True)


if __name__ == "__main__":
    main()
