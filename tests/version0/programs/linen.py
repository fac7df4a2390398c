"""Trains a model of Flax's linen and keeps checkpoints by `flax.training.checkpoints`."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import checkpoints, train_state

directory, steps = sys.argv[1], int(sys.argv[2])


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))


model = Model()
state = train_state.TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), jnp.ones((1, 4)))["params"],
    tx=optax.adam(1e-2),
)
state = checkpoints.restore_checkpoint(directory, state)


@jax.jit
def train(state, x):
    def loss(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - x.sum(axis=1, keepdims=True)) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


for step in range(int(state.step), steps):
    x = jax.random.normal(jax.random.key(step), (8, 4))
    state = train(state, x)
    checkpoints.save_checkpoint(directory, state, int(state.step), keep=2, overwrite=True)
    print("step", int(state.step), flush=True)

# A restored step is a number and a trained one an array, whose bytes differ where their value does not.
leaves = jax.tree.leaves((state.params, state.opt_state, jnp.int32(state.step)))
print(
    "digest", hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest(), flush=True
)
