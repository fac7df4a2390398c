"""Casts on load: what the wanted dtype can hold comes back, what it cannot is an error with its place."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import waystation
from waystation import errors
from waystation.transfers import staging


@pytest.mark.parametrize("wanted", ["float16", "bfloat16", "float64", "int32", "float8_e4m3fn", "complex64"])
def test_numpy_casts(tmp_path: Path, wanted: str) -> None:
    values = np.arange(-8, 8, dtype=np.float32).reshape(4, 4)
    dtype = np.dtype(getattr(ml_dtypes, wanted, None) or wanted)
    waystation.save(tmp_path / "checkpoint", {"x": values})
    loaded = waystation.load(tmp_path / "checkpoint", {"x": np.zeros((4, 4), dtype)})["x"]
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(loaded, values.astype(dtype))


def test_casts_in_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on a group of pieces is made small; nothing is replaced."""
    monkeypatch.setattr(staging, "CAST_GROUP_BYTES", 64)
    values = np.arange(5 * 7 * 11, dtype=np.int32).reshape(5, 7, 11)
    waystation.save(tmp_path / "checkpoint", {"x": values, "y": values[0, 0], "z": np.int32(5)})
    abstract = {"x": jax.ShapeDtypeStruct((5, 7, 11), jnp.float32), "y": torch.zeros(11), "z": np.float64(0)}
    loaded = waystation.load(tmp_path / "checkpoint", abstract)
    np.testing.assert_array_equal(loaded["x"], values.astype(np.float32))
    np.testing.assert_array_equal(loaded["y"].numpy(), values[0, 0].astype(np.float32))
    assert type(loaded["z"]) is np.float64
    assert loaded["z"] == 5


def test_overflow_of_floats_is_infinity_without_a_warning(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.float32([1e30])})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = waystation.load(tmp_path / "checkpoint", {"x": np.zeros(1, np.float16)})
    assert np.isinf(loaded["x"]).all()


@pytest.mark.parametrize(
    "abstract", [np.zeros(2, np.int32), torch.zeros(2, dtype=torch.int32)], ids=["numpy", "torch"]
)
def test_integers_never_wrap(tmp_path: Path, abstract: Any) -> None:
    waystation.save(tmp_path / "checkpoint", {"outer": {"x": np.array([1, 1 << 40])}})
    with pytest.raises(errors.InvalidInput, match="1099511627776") as caught:
        waystation.load(tmp_path / "checkpoint", {"outer": {"x": abstract}})
    assert "x" in caught.value.context["array"]
    waystation.save(tmp_path / "small", {"outer": {"x": np.array([1, -5])}})
    np.testing.assert_array_equal(
        waystation.load(tmp_path / "small", {"outer": {"x": abstract}})["outer"]["x"], [1, -5]
    )


def test_wide_integers_without_64_bit_jax_name_their_leaf(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"outer": {"x": np.array([1 << 40])}})
    with pytest.raises(errors.InvalidInput) as caught:
        waystation.load(tmp_path / "checkpoint", {"outer": {"x": jax.ShapeDtypeStruct((1,), np.int64)}})
    assert caught.value.context["array"] == "['outer']['x']"
    assert "index" not in caught.value.context
