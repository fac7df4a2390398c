"""`Codec.contiguous`: a kind of arrays is described once, as `Codec.sources` does; the rest is left to it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import waystation
from waystation._distinct import distinct_objects
from waystation.checkpoint import prepare
from waystation.errors import InvalidInput, UnsupportedLeaf
from waystation.frameworks.registry import codec_by_name
from waystation.layouts.native.read import open_checkpoint, open_checkpointable

KINDS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "numpy": np.copy,
    "jax": jnp.asarray,
    "torch": torch.from_numpy,
}


def arrays_of(framework: str) -> list[Any]:
    """Many arrays of six kinds."""
    shapes: list[tuple[int, ...]] = [(3,), (2, 2), ()]
    return [
        KINDS[framework](np.full(shapes[number % 3], number, ("float32", "int32")[number % 2]))
        for number in range(60)
    ]


@pytest.mark.parametrize("framework", KINDS)
def test_each_kind_is_described_once_and_as_ever(framework: str) -> None:
    arrays, codec = arrays_of(framework), codec_by_name(framework)
    found = codec.contiguous(arrays)
    assert found is not None
    assert len(found.kinds) == 6
    for number, source in enumerate(codec.sources(arrays)):
        (block,) = source.blocks
        assert found.kinds[found.which[number]] == replace(source, blocks=[])
        assert found.addresses[number] == block.address


def test_arrays_that_are_anything_special_are_left_out() -> None:
    plain = np.arange(6.0).reshape(2, 3)
    masked = np.ma.masked_array(plain, plain > 2)
    objects = np.array([None])
    leaves = [
        plain,
        plain.T,
        np.float32(1),
        masked,
        objects,
        plain[:, :1],
        plain[:1],
        plain.astype("bfloat16"),
    ]
    found = codec_by_name("numpy").contiguous(leaves)
    assert found is not None
    assert (found.which >= 0).tolist() == [True, False, False, False, False, False, True, True]
    tensor = torch.arange(6.0).reshape(2, 3)
    tensors = [tensor, tensor.T, torch.ones(1).expand(4), tensor.to_sparse(), torch.tensor([1j]).conj()]
    found = codec_by_name("torch").contiguous(tensors)
    assert found is not None
    assert (found.which >= 0).tolist() == [True, False, False, False, False]


def test_a_read_only_array_is_contiguous() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    found = codec_by_name("numpy").contiguous([array])
    assert found is not None
    assert found.which.tolist() == [0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_views_keep_the_bytes_of_donated_arrays(dtype: str) -> None:
    arrays = [jnp.arange(1000.0).astype(dtype) + 1 for _ in range(3)]
    expected = np.asarray(arrays[0]).tobytes()
    found = codec_by_name("jax").contiguous(arrays)
    assert found is not None
    assert found.which.tolist() == [0, 0, 0]
    step: Any = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    made = [step(array) for array in arrays]
    for array in arrays:
        array.delete()
    for address in found.addresses.tolist():
        assert ctypes.string_at(address, len(expected)) == expected
    del found, made


def test_a_state_of_both_comes_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for number in range(30):
        array = np.full((number % 4, 3), number, np.int16)
        state[f"{number}"] = (
            array,
            array.T,
            np.int16(number),
            number,
            torch.from_numpy(array.copy()),
            jnp.asarray(array),
            array.astype(ml_dtypes.bfloat16),
        )
    for save in (waystation.save, lambda path, tree: waystation.save_async(path, tree).result()):
        save(tmp_path / "checkpoint", state)
        loaded = waystation.load(tmp_path / "checkpoint", framework="numpy")
        for key, leaves in state.items():
            for leaf, found in zip(leaves, loaded[key], strict=True):
                assert np.asarray(leaf).dtype == np.asarray(found).dtype
                np.testing.assert_array_equal(np.asarray(leaf), np.asarray(found))
        waystation.delete(tmp_path / "checkpoint")


@pytest.mark.parametrize("framework", KINDS)
def test_a_save_describes_and_a_load_finds_few_kinds(framework: str, tmp_path: Path) -> None:
    state = arrays_of(framework)
    described = prepare.describe(state)
    assert len(distinct_objects(described.sources)[0]) == 6
    assert all(owner is not None for owner in described.owners)
    waystation.save(tmp_path / "checkpoint", state)
    path = str(tmp_path / "checkpoint")
    opened = open_checkpointable(path, open_checkpoint(path), "state")
    assert len(distinct_objects(opened.tree.arrays)[0]) == 6


def test_a_refusal_names_its_leaf_among_many(tmp_path: Path) -> None:
    state = {f"a{number}": np.ones(3) for number in range(20)}
    state["a7"] = np.ones((3, 3)).T
    state["a13"] = np.array([object()])
    with pytest.raises(UnsupportedLeaf, match="Python objects") as raised:
        waystation.save(tmp_path / "checkpoint", state)
    assert "a13" in raised.value.context["array"]


def test_a_deleted_array_is_named_among_many(tmp_path: Path) -> None:
    state = {f"a{number}": jnp.ones(3) for number in range(20)}
    state["a13"].delete()
    with pytest.raises(InvalidInput, match="deleted or donated") as raised:
        waystation.save(tmp_path / "checkpoint", state)
    assert "a13" in raised.value.context["array"]


def test_an_array_that_cannot_come_back_as_saved_is_named_among_many(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        wide = {f"b{number}": jnp.ones(2, "float64") for number in range(5)}
        waystation.save(tmp_path / "checkpoint", {"a": jnp.ones(3, "float32"), **wide})
    with pytest.raises(InvalidInput, match="JAX would narrow float64") as raised:
        waystation.load(tmp_path / "checkpoint")
    assert "b0" in raised.value.context["array"]
