"""MaxText's checkpointing module: its checkpointer, saves, resumes, parameters and published models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax
import jax.numpy as jnp
import killed
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from flax.training import train_state
from maxtext.common import checkpoint_context, checkpointing, grain_utility, train_state_nnx
from orbax.checkpoint import v1 as ocp


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def nnx_state(seed: int) -> nnx.State:
    model = Model(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return nnx.state(train_state_nnx.TrainStateNNX(model, optimizer))


def apply(x: jax.Array) -> jax.Array:
    return x


TRANSFORMATION = optax.adamw(1e-3)


def linen_state(seed: int) -> train_state.TrainState:
    key = jax.random.key(seed)
    params = {
        "params": {"dense": {"kernel": jax.random.normal(key, (8, 8)), "bias": jnp.full(8, float(seed))}}
    }
    state = train_state.TrainState.create(apply_fn=apply, params=params, tx=TRANSFORMATION)
    return state.replace(step=jnp.asarray(state.step, jnp.int32))


def config(**changes: Any) -> SimpleNamespace:
    values = {
        "enable_checkpointing": True,
        "checkpoint_period": 1,
        "local_checkpoint_period": 0,
        "enable_continuous_checkpointing": False,
        "enable_autocheckpoint": False,
        "enable_emergency_checkpoint": False,
        "enable_multi_tier_checkpointing": False,
        "enable_diloco": False,
        "save_checkpoint_on_start": True,
        "async_checkpointing": True,
        "dataset_type": "synthetic",
        "expansion_factor_real_data": -1,
        "scan_layers": True,
        "lora": None,
        "elastic_enabled": False,
    }
    return SimpleNamespace(**(values | changes))


def manager(root: Path, *, use_async: bool = False, **options: Any) -> Any:
    return checkpointing.create_orbax_checkpoint_manager(str(root), True, use_async, 1, **options)


def load(run: Any, abstract: Any, **options: Any) -> Any:
    given = {"data_iterator": None, "load_parameters_from_path": "", "load_full_state_from_path": ""}
    return checkpointing.load_state_if_possible(
        run,
        **(given | {"checkpoint_storage_concurrent_gb": 8, "abstract_unboxed_pre_state": abstract} | options),
    )


def leaves_equal(one: Any, two: Any) -> None:
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))
    assert pairs
    for own, other in pairs:
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other))


def abstract_of(state: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def test_no_manager_where_checkpoints_are_off(tmp_path: Path) -> None:
    assert checkpointing.create_orbax_checkpoint_manager(str(tmp_path), False, True, 1) is None


@pytest.mark.parametrize("use_zarr3", [True, False])
@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_async", [True, False])
def test_a_linen_state(tmp_path: Path, use_async: bool, use_ocdbt: bool, use_zarr3: bool) -> None:
    state = linen_state(3)
    run = manager(tmp_path, use_async=use_async, use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    assert checkpointing.save_checkpoint(run, 5, state, config())
    checkpointing.wait_until_finished(run)
    assert checkpointing.latest_step(run) == 5
    restored, params = load(run, abstract_of(linen_state(0)))
    assert params is None
    leaves_equal(restored["items"].params, state.params)
    leaves_equal(restored["items"].opt_state, state.opt_state)
    run.close()


@pytest.mark.parametrize("use_async", [True, False])
def test_an_nnx_state(tmp_path: Path, use_async: bool) -> None:
    state = nnx_state(3)
    run = manager(tmp_path, use_async=use_async)
    assert checkpointing.save_checkpoint(run, 1, state, config())
    checkpointing.wait_until_finished(run)
    restored, _ = load(run, abstract_of(nnx_state(0)))
    leaves_equal(restored["items"].to_pure_dict()["model"], state.to_pure_dict()["model"])
    run.close()


def test_a_run_goes_on_from_the_newest_or_a_given_step(tmp_path: Path) -> None:
    run = manager(tmp_path, max_num_checkpoints_to_keep=2)
    for step in range(4):
        checkpointing.maybe_save_checkpoint(run, linen_state(step), config(), None, step=step)
    checkpointing.wait_until_finished(run)
    assert list(checkpointing.all_steps(run)) == [2, 3]
    run.close()
    again = manager(tmp_path)
    assert checkpointing.latest_step(again) == 3
    newest, _ = load(again, abstract_of(linen_state(0)))
    older, _ = load(again, abstract_of(linen_state(0)), step=2)
    leaves_equal(newest["items"].params, linen_state(3).params)
    leaves_equal(older["items"].params, linen_state(2).params)
    again.close()


def test_a_step_that_is_there_is_skipped(tmp_path: Path) -> None:
    run = manager(tmp_path)
    assert checkpointing.save_checkpoint(run, 1, linen_state(1), config())
    assert not checkpointing.save_checkpoint(run, 1, linen_state(2), config())
    restored, _ = load(run, abstract_of(linen_state(0)))
    leaves_equal(restored["items"].params, linen_state(1).params)
    run.close()


def test_nothing_to_load(tmp_path: Path) -> None:
    run = manager(tmp_path)
    assert checkpointing.latest_step(run) is None
    assert load(run, abstract_of(linen_state(0))) == (None, None)
    run.close()


def test_metadata_of_the_program(tmp_path: Path) -> None:
    run = manager(tmp_path)
    checkpointing.save_checkpoint(run, 0, linen_state(1), config(scan_layers=False))
    checkpointing.wait_until_finished(run)
    run.close()
    assert checkpointing.load_checkpoint_metadata(str(tmp_path / "0")) == {"scan_layers": False}
    assert checkpointing.load_checkpoint_metadata(str(tmp_path / "0" / "items")) == {"scan_layers": False}
    assert checkpointing.load_checkpoint_metadata(str(tmp_path / "nothing")) == {}


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_parameters_alone(tmp_path: Path, use_ocdbt: bool) -> None:
    params = linen_state(3).params
    checkpointing.save_params_to_path(str(tmp_path / "p"), params, use_ocdbt=use_ocdbt)
    for path in (tmp_path / "p", tmp_path / "p" / "items"):
        _, found = load(
            None, abstract_of(linen_state(0)), load_parameters_from_path=str(path), use_ocdbt=use_ocdbt
        )
        leaves_equal(found, params)


def test_parameters_of_a_run(tmp_path: Path) -> None:
    run = manager(tmp_path)
    checkpointing.save_checkpoint(run, 0, nnx_state(3), config())
    checkpointing.wait_until_finished(run)
    run.close()
    _, found = load(None, abstract_of(nnx_state(0)), load_parameters_from_path=str(tmp_path / "0" / "items"))
    leaves_equal(found.to_pure_dict(), nnx_state(3).to_pure_dict()["model"])


def test_a_whole_state_by_its_path(tmp_path: Path) -> None:
    state = linen_state(3)
    ocp.save(tmp_path / "whole", state)
    restored, _ = load(None, abstract_of(linen_state(0)), load_full_state_from_path=str(tmp_path / "whole"))
    leaves_equal(restored["items"].params, state.params)


def convert(state: dict[str, Any]) -> dict[str, Any]:
    return {"params": {"params": {"dense": {"kernel": state["kernel"]}}}}


def test_a_published_model(tmp_path: Path) -> None:
    kernel = np.arange(64, dtype=np.float32).reshape(8, 8)
    safetensors.numpy.save_file({"kernel": kernel, "bias": kernel[0]}, tmp_path / "model.safetensors")
    restored, _ = load(
        None,
        abstract_of(linen_state(0)),
        load_full_state_from_path=str(tmp_path / "model.safetensors"),
        source_checkpoint_layout="safetensors",
        checkpoint_conversion_fn=convert,
    )
    found = restored["items"]["params"]["params"]["dense"]["kernel"]
    assert len(found.sharding.device_set) == jax.device_count()
    np.testing.assert_array_equal(found, kernel)


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ocp.errors.InvalidLayoutError):
        load(
            None,
            abstract_of(linen_state(0)),
            load_full_state_from_path=str(tmp_path / "x"),
            source_checkpoint_layout="zarr",
        )


@pytest.mark.parametrize("layout", ["ORBAX", "SAFETENSORS", "AUTO"])
def test_contexts_take_every_layout(layout: str) -> None:
    context = checkpoint_context.build_context(
        checkpoint_layout=getattr(ocp.options.CheckpointLayout, layout)
    )
    assert context.checkpoint_layout.name == layout


def test_contexts_of_other_flags() -> None:
    checkpoint_context.build_context(
        use_ocdbt=False,
        use_zarr3=False,
        ocdbt_target_data_file_size_bytes=1 << 30,
        checkpoint_storage_concurrent_gb=96,
        enable_continuous_checkpointing=True,
        todelete_full_path="bucket/deleted",
        enable_single_replica_ckpt_restoring=True,
        replica_axis_index=1,
        colocated_python_checkpointing=True,
        partial_load=True,
    )


def data() -> Any:
    return iter(grain.MapDataset.range(100).batch(2).to_iter_dataset())


def test_an_iterator_of_grain_goes_on(tmp_path: Path) -> None:
    iterator, run = data(), manager(tmp_path)
    for _ in range(3):
        next(iterator)
    settings = config(dataset_type="grain")
    assert checkpointing.save_checkpoint(run, 7, linen_state(1), settings, iterator)
    expected = next(iterator)
    checkpointing.wait_until_finished(run)
    assert sorted(path.name for path in (tmp_path / "7" / "iter").glob("process_*")) == [
        "process_0-of-1.json"
    ]
    fresh = data()
    load(run, abstract_of(linen_state(0)), dataset_type="grain", data_iterator=fresh)
    np.testing.assert_array_equal(next(fresh), expected)
    run.close()


class Position:
    """An iterator that knows its state, as those of MaxText's input pipeline do."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def get_state(self) -> bytes:
        return json.dumps({"position": self.position}).encode()

    def set_state(self, state: bytes) -> None:
        self.position = json.loads(state)["position"]


def test_iterators_of_more_hosts_than_there_are_processes(tmp_path: Path) -> None:
    run = manager(tmp_path)
    iterators = [(Position(number), number, 3) for number in range(3)]
    checkpointables = {"items": linen_state(1), "iter": grain_utility.GrainCheckpointable(iterators)}
    run.save_checkpointables(0, checkpointables)
    names = sorted(path.name for path in (tmp_path / "0" / "iter").glob("process_*"))
    assert names == [f"process_{number}-of-3.json" for number in range(3)]
    assert json.loads((tmp_path / "0" / "iter" / names[2]).read_text()) == {"position": 2}
    fresh = [Position() for _ in range(3)]
    wanted = grain_utility.GrainCheckpointable(
        fresh, restore_process_index=[0, 1, 2], restore_process_count=3
    )
    run.load_checkpointables(0, {"iter": wanted})
    assert [iterator.position for iterator in fresh] == [0, 1, 2]
    single = Position()
    wanted = grain_utility.GrainCheckpointable(single, restore_process_index=1, restore_process_count=3)
    run.load_checkpointables(0, {"iter": wanted})
    assert single.position == 1
    run.close()


class Elastic(grain_utility.ElasticIterator):
    """MaxText's elastic iterator, without a data set."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_an_elastic_iterator_has_one_file(tmp_path: Path) -> None:
    run = manager(tmp_path)
    run.save_checkpointables(0, {"iter": grain_utility.GrainCheckpointable(Elastic(9))})
    assert (tmp_path / "0" / "iter" / "process_0.json").exists()
    fresh = Elastic()
    run.load_checkpointables(0, {"iter": grain_utility.GrainCheckpointable(fresh)})
    assert fresh.position == 9
    run.close()


def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    killed.assert_same_bits("run_maxtext.py", tmp_path)
