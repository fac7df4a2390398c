"""Trains over eight devices as MaxText and kauldron do: state, configuration and data iterator are items."""

# ruff: noqa: T201 - it tells what it does
import hashlib
import sys

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

directory, steps = sys.argv[1], int(sys.argv[2])
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
whole = NamedSharding(mesh, PartitionSpec())
by_rank = {2: NamedSharding(mesh, PartitionSpec("data", "model")), 1: whole, 0: whole}
optimizer = optax.adamw(1e-2)


def init():
    params = {"w": jnp.ones((16, 8)) / 16, "b": jnp.zeros(8)}
    state = {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0)}
    return jax.tree.map(lambda leaf: jax.device_put(leaf, by_rank[leaf.ndim]), state)


source = grain.RangeDataSource(0, 1000, 1)
sampler = grain.IndexSampler(1000, grain.NoSharding(), shuffle=True, num_epochs=None, seed=3)
data = iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))

manager = ocp.CheckpointManager(
    directory,
    item_names=("items", "iter", "config"),
    options=ocp.CheckpointManagerOptions(
        create=True,
        max_to_keep=2,
        save_interval_steps=1,
        enable_async_checkpointing=True,
        best_fn=lambda metrics: metrics["step"],
        step_prefix="ckpt",
        async_options=ocp.AsyncOptions(timeout_secs=60),
    ),
)
state, latest = init(), manager.latest_step()
if latest is not None:
    restore_args = ocp.checkpoint_utils.construct_restore_args(state)
    restored = manager.restore(
        latest,
        args=ocp.args.Composite(
            items=ocp.args.PyTreeRestore(item=state, restore_args=restore_args),
            iter=grain.PyGrainCheckpointRestore(data),
            config=ocp.args.JsonRestore(),
        ),
    )
    state = restored["items"]
    assert restored["config"] == {"learning_rate": 1e-2}


@jax.jit
def train(state, x):
    def loss(params):
        return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)

    updates, opt = optimizer.update(jax.grad(loss)(state["params"]), state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}


for step in range(int(state["step"]), steps):
    number = int(next(data))
    state = train(state, jnp.full((4, 16), number / 1000))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(), state)
    manager.save(
        step,
        args=ocp.args.Composite(
            items=ocp.args.PyTreeSave(item=state, save_args=save_args),
            iter=grain.PyGrainCheckpointSave(data),
            config=ocp.args.JsonSave({"learning_rate": 1e-2}),
        ),
        metrics={"step": step},
    )
    print("step", step, number, flush=True)
manager.wait_until_finished()
manager.close()
leaves = jax.tree.leaves(state)
print(
    "digest", hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest(), flush=True
)
