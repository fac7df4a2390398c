"""Trains a model of Flax's nnx; its state is saved by a `CheckpointManager`."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

directory, steps = sys.argv[1], int(sys.argv[2])


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(nnx.relu(self.first(x))))


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
manager = ocp.CheckpointManager(directory, options=options)
graph, state = nnx.split((model, optimizer))
start = 0
if manager.latest_step() is not None:
    start = manager.latest_step() + 1
    abstract = jax.tree.map(
        ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(nnx.state((model, optimizer), nnx.Not(nnx.RngKey)))
    )
    restored = manager.restore(
        manager.latest_step(),
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), keys=ocp.args.JaxRandomKeyRestore()
        ),
    )
    nnx.update((model, optimizer), nnx.State(restored.state))
    model.drop.rngs.key[...] = restored["keys"]


@nnx.jit
def train(model, optimizer, x):
    def loss(model):
        return jnp.mean((model(x) - x.sum(axis=1, keepdims=True)) ** 2)

    optimizer.update(model, nnx.grad(loss)(model))


for step in range(start, steps):
    train(model, optimizer, jax.random.normal(jax.random.key(step), (8, 4)))
    pure = nnx.to_pure_dict(nnx.state((model, optimizer), nnx.Not(nnx.RngKey)))
    manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(pure), keys=ocp.args.JaxRandomKeySave(model.drop.rngs.key[...])
        ),
    )
    print("step", step, flush=True)
manager.close()

leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state((model, optimizer), nnx.Not(nnx.RngKey))))
print(
    "digest", hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest(), flush=True
)
