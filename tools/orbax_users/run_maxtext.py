"""Trains a state over four devices, saved and resumed by MaxText's checkpointing module."""

import hashlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxtext.common import checkpointing
from test_maxtext import abstract_of, config, linen_state, load, manager

directory, steps = Path(sys.argv[1]), int(sys.argv[2])
directory.mkdir(exist_ok=True)
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
by_rank = {2: NamedSharding(mesh, PartitionSpec("fsdp"))}
state = jax.tree.map(
    lambda leaf: jax.device_put(leaf, by_rank.get(leaf.ndim, NamedSharding(mesh, PartitionSpec()))),
    linen_state(0),
)
run = manager(directory, use_async=True, max_num_checkpoints_to_keep=2)
restored, _ = load(run, abstract_of(state))
if restored is not None:
    state = restored["items"]


@jax.jit
def train(state, x):
    """One step."""

    def loss(params):
        layer = params["params"]["dense"]
        return jnp.mean((x @ layer["kernel"] + layer["bias"] - 1) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


for step in range(int(state.step), steps):
    state = train(state, jax.random.normal(jax.random.key(step), (4, 8)))
    checkpointing.maybe_save_checkpoint(run, state, config(), None, step=step)
    print("step", step, flush=True)
checkpointing.wait_until_finished(run)
run.close()
data = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state.params, state.opt_state)))
print("digest", hashlib.sha256(data).hexdigest(), flush=True)
