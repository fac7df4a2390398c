"""Trains a transformed function of Haiku: parameters, state and moments are saved by a
`StandardCheckpointer`."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import os
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

directory, steps = sys.argv[1], int(sys.argv[2])


def network(x, is_training):
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hk.Linear(16)(x), is_training)
    return hk.Linear(1)(jax.nn.relu(x))


model, optimizer = hk.transform_with_state(network), optax.adam(1e-2)
params, state = model.init(jax.random.key(0), jnp.ones((2, 4)), is_training=True)
whole = {"params": params, "state": state, "moments": optimizer.init(params), "step": jnp.int32(0)}
manager = ocp.CheckpointManager(os.path.abspath(directory), ocp.StandardCheckpointer())
if manager.latest_step() is not None:
    whole = manager.restore(manager.latest_step(), items=whole)


@jax.jit
def train(whole, x):
    def loss(params):
        out, state = model.apply(params, whole["state"], None, x, is_training=True)
        return jnp.mean((out - x.sum(axis=1, keepdims=True)) ** 2), state

    gradients, state = jax.grad(loss, has_aux=True)(whole["params"])
    updates, moments = optimizer.update(gradients, whole["moments"])
    params = optax.apply_updates(whole["params"], updates)
    return {"params": params, "state": state, "moments": moments, "step": whole["step"] + 1}


for step in range(int(whole["step"]), steps):
    whole = train(whole, jax.random.normal(jax.random.key(step), (8, 4)))
    manager.save(step, whole)
    print("step", step, flush=True)
manager.wait_until_finished()
leaves = jax.tree.leaves(whole)
print(
    "digest", hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest(), flush=True
)
