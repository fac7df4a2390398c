"""States of Flax: of nnx and of linen, abstract ones as its guide makes them, and on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def equal(one: Any, two: Any) -> None:
    for own, other in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(bits(own), bits(other))


def bits(leaf: Any) -> Any:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


@pytest.mark.parametrize("in_background", [False, True])
def test_a_model_of_nnx(tmp_path: Path, in_background: bool) -> None:
    graph, state = nnx.split(Model(nnx.Rngs(3)))
    if in_background:
        ocp.save_async(tmp_path / "c", state).result()
    else:
        ocp.save(tmp_path / "c", state)
    _, abstract = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    loaded = ocp.load(tmp_path / "c", abstract)
    equal(loaded, state)
    assert nnx.merge(graph, loaded)(jnp.ones((2, 8))).shape == (2, 8)


def test_a_pure_dict_of_nnx(tmp_path: Path) -> None:
    state = nnx.state(Model(nnx.Rngs(3)), nnx.Param)
    ocp.save(tmp_path / "c", nnx.to_pure_dict(state))
    restored = nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(0)), nnx.Param))
    loaded = ocp.load(tmp_path / "c", restored)
    equal(loaded, nnx.to_pure_dict(state))


def test_an_optimizer_of_nnx(tmp_path: Path) -> None:
    model = Model(nnx.Rngs(3))
    state = nnx.state(nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))
    ocp.save(tmp_path / "c", state)
    fresh = nnx.state(nnx.Optimizer(Model(nnx.Rngs(0)), optax.adamw(1e-3), wrt=nnx.Param))
    equal(ocp.load(tmp_path / "c", fresh), state)


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
def test_other_meshes(tmp_path: Path, shape: tuple[int, int]) -> None:
    state = nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(3)), nnx.Param))
    ocp.save(tmp_path / "c", state)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))

    def wanted(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("data", "model") if leaf.ndim == 2 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    abstract = jax.tree.map(wanted, state)
    loaded = ocp.load(tmp_path / "c", abstract)
    equal(loaded, state)
    jax.tree.map(lambda own, asked: own.sharding.is_equivalent_to(asked.sharding, own.ndim), loaded, abstract)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(4)(x)


def linen_state(seed: int) -> train_state.TrainState:
    module = Dense()
    params = module.init(jax.random.key(seed), jnp.ones((1, 8)))
    return train_state.TrainState.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-3))


def test_a_train_state_of_linen(tmp_path: Path) -> None:
    state = linen_state(3)
    ocp.save(tmp_path / "c", state)
    loaded = ocp.load(tmp_path / "c", linen_state(0))
    assert isinstance(loaded, train_state.TrainState)
    equal(loaded.params, state.params)
    equal(loaded.opt_state, state.opt_state)


def test_metadata_say_what_is_there(tmp_path: Path) -> None:
    params = linen_state(3).params
    ocp.save(tmp_path / "c", params, custom_metadata={"epoch": 4})
    found = ocp.metadata(tmp_path / "c")
    assert found.custom_metadata == {"epoch": 4}
    shapes = jax.tree.map(lambda leaf: tuple(leaf.shape), found.metadata)
    assert shapes == jax.tree.map(lambda leaf: tuple(leaf.shape), params)


def test_parts_of_a_state(tmp_path: Path) -> None:
    params = linen_state(3).params
    ocp.save(tmp_path / "c", params)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    kernel = params["params"]["Dense_0"]["kernel"]
    with context:
        loaded = ocp.load(tmp_path / "c", {"params": {"Dense_0": {"kernel": kernel}}})
    np.testing.assert_array_equal(loaded["params"]["Dense_0"]["kernel"], kernel)
    with pytest.raises((ValueError, KeyError)):
        ocp.load(tmp_path / "c", {"params": {"Dense_0": {"kernel": kernel}}})
