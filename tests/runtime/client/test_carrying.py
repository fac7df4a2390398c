"""What travels to hosts to be saved gives the checkpoint that the program would have written itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import waystation
from waystation.checkpoint.compare import compare
from waystation.errors import InvalidInput
from waystation.frameworks import torch_memory
from waystation.runtime.client.carrying import asked_of, carry, making


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits; of truth values, such."""
    generator = torch.Generator().manual_seed(1)
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator)
    return data.to(torch.uint8).view(dtype).view(shape)


def require_same_checkpoint(leaves: dict[str, Any], directory: Path) -> None:
    """Saves leaves here, and as a process would that has only what has travelled."""
    carried = pickle.loads(pickle.dumps({name: carry(leaf) for name, leaf in leaves.items()}))
    waystation.save(directory / "here", leaves)
    waystation.save(directory / "there", carried)
    assert not compare(directory / "here", directory / "there").differences


@pytest.mark.share(3)
@pytest.mark.parametrize("name", sorted(torch_memory._BY_NAME))
def test_every_dtype_of_torch(tmp_path: Path, name: str) -> None:
    dtype = torch_memory.torch_dtype(name)
    tensors = {str(shape): random_tensor(shape, dtype) for shape in ((), (3,), (4, 5), (0, 3))}
    require_same_checkpoint(tensors, tmp_path)
    found = waystation.load(tmp_path / "there")
    for shape, tensor in tensors.items():
        assert found[shape].dtype == dtype
        numbers = waystation.load(
            tmp_path / "there", dict.fromkeys(tensors, ...) | {shape: asked_of(tensor)}
        )[shape]
        made = making(tensor)(pickle.loads(pickle.dumps(numbers)))
        assert made.dtype == dtype
        assert bits(made) == bits(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def test_gradients_conjugates_and_keys(tmp_path: Path) -> None:
    leaves = {
        "parameter": torch.nn.Parameter(torch.arange(3.0)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3).reshape(3, 1),
        "none": jax.random.split(jax.random.key(4), 0),
    }
    require_same_checkpoint(leaves, tmp_path)
    found = waystation.load(tmp_path / "there")
    assert found["parameter"].requires_grad
    assert found["conjugate"].item() == 1 - 2j
    for name in ("key", "keys", "none"):
        assert found[name].dtype == leaves[name].dtype
        np.testing.assert_array_equal(jax.random.key_data(found[name]), jax.random.key_data(leaves[name]))


@given(st.data())
def test_tensors_of_any_strides(data: st.DataObject) -> None:
    """Slices, transposes, and elements that are there several times."""
    whole = torch.arange(4000, dtype=torch.int32)
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    strides = data.draw(st.tuples(*[st.integers(0, 40) for _ in shape]))
    tensor = whole.as_strided(shape, strides, data.draw(st.integers(0, 100)))
    assert carry(tensor).data.tobytes() == tensor.numpy().tobytes()


def test_what_is_spread_is_refused() -> None:
    devices = np.array(jax.devices()[:2])
    mesh = jax.sharding.Mesh(devices, "x")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 2), spread)
    with pytest.raises(InvalidInput, match="spread over devices of this program; put it on one device"):
        carry(keys)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    key = jax.device_put(jax.random.key(7), replicated)
    np.testing.assert_array_equal(carry(key).data.view(np.uint32), [0, 7])
