"""Trains a model with weights of LoRA, saved and resumed by the checkpoint manager of tunix."""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from test_tunix import Model
from tunix.sft import checkpoint_manager

directory, steps = sys.argv[1], int(sys.argv[2])
model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
manager = checkpoint_manager.CheckpointManager(
    directory, ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=2)
)
start, _ = manager.maybe_restore(model, optimizer)


@nnx.jit
def train(model, optimizer, x):
    """One step."""

    def loss(model):
        return jnp.mean((model(x) - x[:, ::-1]) ** 2)

    optimizer.update(model, nnx.grad(loss)(model))


for step in range(start + 1, steps + 1):
    train(model, optimizer, jax.random.normal(jax.random.key(step), (4, 8)))
    manager.save(step, model, optimizer, custom_metadata={"tokens": 32 * step})
    print("step", step, flush=True)
manager.close()
leaves = jax.tree.leaves((nnx.state(model), nnx.state(optimizer, nnx.optimizer.OptState)))
data = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
