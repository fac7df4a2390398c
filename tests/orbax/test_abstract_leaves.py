"""Abstract leaves that no framework knows, and shardings over abstract meshes load as with Orbax."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as oracle

import waystation
from waystation import errors

SHAPE = (8, 4)


@dataclasses.dataclass
class Described:
    """What Orbax's protocol `AbstractArray` asks for, and no more."""

    shape: Any
    dtype: Any


@dataclasses.dataclass
class Sharded:
    """What Orbax's protocol `AbstractShardedArray` asks for."""

    shape: Any
    dtype: Any
    sharding: Any


class Plain:
    """A class that is no dataclass."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


class Pair(NamedTuple):
    """A container whose children have the names of the protocol."""

    shape: Any
    dtype: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    """A container of JAX's, likewise."""

    shape: Any
    dtype: Any


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """The same state, saved by Orbax and by us."""
    state = {f"w{number}": np.arange(32, dtype=np.float32).reshape(SHAPE) + number for number in range(6)}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    waystation.save(ours, state)
    oracle.save(theirs, state)
    return ours, theirs


def _same(ours: Any, theirs: Any) -> None:
    assert isinstance(ours, jax.Array) == isinstance(theirs, jax.Array)
    assert ours.dtype == theirs.dtype
    assert getattr(ours, "sharding", None) == getattr(theirs, "sharding", None)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("seed", range(8))
def test_leaves_of_any_kind_load_as_orbax_loads_them(saved: tuple[Path, Path], seed: int) -> None:
    choose = random.Random(seed)
    place = SingleDeviceSharding(jax.devices()[0])
    kinds = [
        lambda dtype: Described(SHAPE, dtype),
        lambda dtype: Sharded(SHAPE, dtype, place),
        lambda dtype: jax.ShapeDtypeStruct(SHAPE, dtype, sharding=place),
        lambda dtype: np.empty(SHAPE, dtype),
    ]
    abstract = {
        f"w{number}": choose.choice(kinds)(np.dtype(choose.choice(["float32", "float16"])))
        for number in range(6)
    }
    ours, theirs = saved
    expected = oracle.load(theirs, abstract)
    for path in saved:
        loaded = waystation.load(path, abstract)
        for name, value in expected.items():
            _same(loaded[name], value)
    named = waystation.load_checkpointables(ours, {"state": abstract})["state"]
    for name, value in expected.items():
        _same(named[name], value)


def test_any_object_with_shape_and_dtype_is_one(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.ones(SHAPE, np.float32), "b": np.ones(3)})
    loaded = waystation.load(tmp_path / "c", {"a": Plain(SHAPE, "float16"), "b": Described(None, None)})
    assert loaded["a"].dtype == np.float16
    assert loaded["b"].tolist() == [1.0, 1.0, 1.0]


def test_containers_with_such_fields_stay_containers(tmp_path: Path) -> None:
    one = np.ones(2, np.float32)
    for cls in (Pair, Node):
        waystation.save(tmp_path / cls.__name__, cls(one, one))
        abstract = cls(Described((2,), np.float32), Described((2,), np.float32))
        loaded = waystation.load(tmp_path / cls.__name__, abstract)
        assert type(loaded) is cls
        np.testing.assert_array_equal(loaded.dtype, one)


def test_what_describes_no_array_is_refused(tmp_path: Path) -> None:
    waystation.save(tmp_path / "c", {"a": np.ones(SHAPE, np.float32)})
    with pytest.raises(errors.InvalidInput, match="describes no array") as caught:
        waystation.load(tmp_path / "c", {"a": Plain(SHAPE, "no such dtype")})
    assert "'a'" in str(caught.value)
    with pytest.raises(errors.StructureMismatch):
        waystation.load(tmp_path / "c", {"a": Described((8, 5), np.float32)})


@pytest.mark.parametrize(
    "spec", [PartitionSpec("x", "y"), PartitionSpec(("x", "y")), PartitionSpec(None, "y")]
)
def test_a_sharding_over_an_abstract_mesh_is_over_the_mesh_in_effect(
    saved: tuple[Path, Path], spec: PartitionSpec
) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh.abstract_mesh, spec)
    abstract = {
        f"w{number}": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding) for number in range(6)
    }
    ours, theirs = saved
    with jax.set_mesh(mesh):
        expected = oracle.load(theirs, abstract)
        for path in saved:
            loaded = waystation.load(path, abstract)
            for name, value in expected.items():
                _same(loaded[name], value)
    with pytest.raises(errors.InvalidInput, match=r"jax\.set_mesh"):
        waystation.load(ours, abstract)
    other = jax.make_mesh((2,), ("z",), devices=jax.devices()[:2])
    with jax.set_mesh(other), pytest.raises(errors.InvalidInput, match="does not fit the mesh in effect"):
        waystation.load(ours, abstract)


def test_loads_in_the_background_take_the_mesh_in_effect_along(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    spec = PartitionSpec("x", "y")
    abstract = {
        "w": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=NamedSharding(mesh.abstract_mesh, spec))
    }
    state = {"w": np.arange(32, dtype=np.float32).reshape(SHAPE)}
    with waystation.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state)
        path = checkpointer.directory / "1"
        with jax.set_mesh(mesh):
            started = [
                waystation.load_async(path, abstract),
                checkpointer.load_async(1, abstract),
                checkpointer.load_async(None, abstract),
            ]
            named = [
                waystation.load_checkpointables_async(path, {"state": abstract}),
                checkpointer.load_checkpointables_async(1, {"state": abstract}),
            ]
        loaded = [*(response.result() for response in started), *(each.result()["state"] for each in named)]
        for found in loaded:
            assert found["w"].sharding == NamedSharding(mesh, spec)
            np.testing.assert_array_equal(found["w"], state["w"])
        with pytest.raises(errors.InvalidInput, match=r"jax\.set_mesh"):
            waystation.load_async(path, abstract).result()
