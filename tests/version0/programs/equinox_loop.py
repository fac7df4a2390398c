"""Trains a module of Equinox, whose arrays a `CheckpointManager` saves."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

directory, steps = sys.argv[1], int(sys.argv[2])
optimizer = optax.adamw(1e-2)
model = eqx.nn.MLP(4, 1, width_size=16, depth=1, key=jax.random.key(0))
state = {"model": model, "moments": optimizer.init(eqx.filter(model, eqx.is_inexact_array))}
manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))
arrays, rest = eqx.partition(state, eqx.is_array)
start = 0
if manager.latest_step() is not None:
    start = manager.latest_step() + 1
    arrays = manager.restore(start - 1, args=ocp.args.StandardRestore(arrays))
state = eqx.combine(arrays, rest)


@eqx.filter_jit
def train(state, x):
    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - x.sum(axis=1, keepdims=True)) ** 2)

    model = state["model"]
    updates, moments = optimizer.update(
        eqx.filter_grad(loss)(model), state["moments"], eqx.filter(model, eqx.is_inexact_array)
    )
    return {"model": eqx.apply_updates(model, updates), "moments": moments}


for step in range(start, steps):
    state = train(state, jax.random.normal(jax.random.key(step), (8, 4)))
    manager.save(step, args=ocp.args.StandardSave(eqx.filter(state, eqx.is_array)))
    print("step", step, flush=True)
manager.close()
leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
print(
    "digest", hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest(), flush=True
)
