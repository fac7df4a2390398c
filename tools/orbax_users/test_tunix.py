"""What tunix does with Orbax: its options, and the life of a run under them.

The checkpoint manager of tunix 0.1.7 uses version 0 of Orbax's interface, and later ones version 1. A run is
saved, killed and resumed by that manager itself. What its options make is used with version 1, as later
managers do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import killed
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import pathways
from orbax.checkpoint import v1 as ocp
from tunix.sft import checkpoint_options


class Model(nnx.Module):
    """Two layers, the first with weights of LoRA."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)
        self.adapter = nnx.LoRA(8, 2, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x))) + self.adapter(x)


def checkpointer(root: Path, options: Any = None, *, persistence: bool = False) -> Any:
    resolved = checkpoint_options.resolve_checkpointing_defaults(options)
    context = ocp.Context()
    context.async_options.timeout_secs = resolved.async_options.timeout_secs
    context.pathways.checkpointing_impl = pathways.CheckpointingImpl.from_options(
        use_colocated_python=False, use_persistence_array_handler=persistence
    )
    return ocp.training.Checkpointer(
        root,
        context=context,
        save_decision_policy=resolved.save_decision_policy,
        preservation_policy=resolved.preservation_policy,
        step_name_format=resolved.step_name_format,
    )


EVERY_STEP = checkpoint_options.create_checkpointing_options(
    save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
    preservation_policy=ocp.training.preservation_policies.LatestN(2),
)


def test_defaults_are_those_of_tunix() -> None:
    resolved = checkpoint_options.resolve_checkpointing_defaults(None)
    assert resolved.async_options.timeout_secs == 1200
    assert resolved.enable_async_checkpointing
    assert resolved.step_name_format.build_name(7) == "7"
    assert resolved.preservation_policy == ocp.training.preservation_policies.LatestN(n=3)


def test_older_options_become_policies() -> None:
    import orbax.checkpoint as version0

    older = version0.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=4)
    resolved = checkpoint_options.resolve_checkpointing_defaults(older)
    assert resolved.save_decision_policy.interval == 5
    assert resolved.preservation_policy.n == 4


def test_own_options_come_before_the_defaults() -> None:
    own = checkpoint_options.create_checkpointing_options(
        async_options=ocp.options.AsyncOptions(timeout_secs=60), enable_async_checkpointing=False
    )
    resolved = checkpoint_options.resolve_checkpointing_defaults(own)
    assert (resolved.async_options.timeout_secs, resolved.enable_async_checkpointing) == (60, False)


@pytest.mark.parametrize("persistence", [False, True])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_model_and_its_optimizer(tmp_path: Path, in_background: bool, persistence: bool) -> None:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    states = {
        "model_params": nnx.state(model),
        "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
    }
    with checkpointer(tmp_path, EVERY_STEP, persistence=persistence) as run:
        if in_background:
            run.save_checkpointables_async(1, states, custom_metadata={"tokens": 5}).result()
        else:
            assert run.save_checkpointables(1, states, custom_metadata={"tokens": 5})
        assert run.latest.step == 1
        assert run.checkpointables_metadata(1).custom_metadata == {"tokens": 5}
        fresh = Model(nnx.Rngs(1))
        again = nnx.Optimizer(fresh, optax.adam(1e-3), wrt=nnx.Param)
        loaded = run.load_checkpointables(
            1,
            {"model_params": nnx.state(fresh), "optimizer_state": nnx.state(again, nnx.optimizer.OptState)},
        )
    nnx.update(fresh, loaded["model_params"])
    nnx.update(again, loaded["optimizer_state"])
    x = jnp.ones((3, 8))
    np.testing.assert_array_equal(model(x), fresh(x))


def test_lora_weights_alone(tmp_path: Path) -> None:
    model = Model(nnx.Rngs(0))
    with checkpointer(tmp_path, EVERY_STEP) as run:
        run.save_checkpointables(3, {"model_params": nnx.state(model, nnx.LoRAParam)})
        fresh = Model(nnx.Rngs(1))
        loaded = run.load_checkpointables(3, {"model_params": nnx.state(fresh, nnx.LoRAParam)})
    nnx.update(fresh, loaded["model_params"])
    for own, other in zip(
        jax.tree.leaves(nnx.state(model, nnx.LoRAParam)),
        jax.tree.leaves(nnx.state(fresh, nnx.LoRAParam)),
        strict=True,
    ):
        np.testing.assert_array_equal(own, other)
    assert not np.array_equal(model.first.kernel[...], fresh.first.kernel[...])


def test_the_last_ones_stay(tmp_path: Path) -> None:
    with checkpointer(tmp_path, EVERY_STEP) as run:
        for step in range(5):
            run.save(step, {"a": jnp.full(3, step)})
        assert [found.step for found in run.checkpoints] == [3, 4]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    with checkpointer(tmp_path, EVERY_STEP) as run:
        assert run.load()["a"].tolist() == [4, 4, 4]
        assert run.load(3)["a"].tolist() == [3, 3, 3]


def test_a_policy_may_decline(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as run:  # every 180 seconds
        assert run.save(0, {"a": jnp.zeros(2)})
        assert not run.should_save(1)
        assert not run.save(1, {"a": jnp.zeros(2)})
        assert run.save(2, {"a": jnp.zeros(2)}, force=True)


def test_a_step_that_is_there_is_refused(tmp_path: Path) -> None:
    with checkpointer(tmp_path, EVERY_STEP) as run:
        run.save(1, {"a": jnp.zeros(2)})
        with pytest.raises(FileExistsError):
            run.save(1, {"a": jnp.zeros(2)})
        with pytest.raises((FileNotFoundError, ValueError)):
            run.load(7)


def test_other_shardings(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tp"))
    rows = NamedSharding(mesh, PartitionSpec("fsdp", "tp"))
    columns = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    values = jax.device_put(jnp.arange(64.0).reshape(8, 8), rows)
    with checkpointer(tmp_path, EVERY_STEP) as run:
        run.save(1, {"w": values})
        loaded = run.load(1, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)})["w"]
    assert loaded.sharding.is_equivalent_to(columns, 2)
    np.testing.assert_array_equal(loaded, values)


def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    killed.assert_same_bits("run_tunix.py", tmp_path)
