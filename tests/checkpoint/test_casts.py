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
from waystation.frameworks import torch_devices
from waystation.frameworks.base import CastRule
from waystation.transfers import staging


@pytest.mark.parametrize("wanted", ["float16", "bfloat16", "float64", "float8_e4m3fn", "complex64"])
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


def kept_in(kind: str, shape: tuple[int, ...], dtype: str) -> Any:
    """An abstract array of a framework."""
    if kind == "torch":
        return torch.zeros(shape, dtype=getattr(torch, dtype))
    return np.zeros(shape, dtype) if kind == "numpy" else jax.ShapeDtypeStruct(shape, np.dtype(dtype))


KINDS = ["numpy", "torch", "jax"]
LAYOUTS = [None, True, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_ocdbt", LAYOUTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_no_load_changes_values_in_silence(
    tmp_path: Path, kind: str, use_ocdbt: bool | None, in_place: bool
) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    context.array.loading.in_place = in_place
    values = np.float32([2.7, -1.5, 3e9, np.nan])
    with context:
        waystation.save(tmp_path / "checkpoint", {"outer": {"x": values, "large": np.float32([1, 1e30])}})
        for dtype in ("int32", "bool", "uint8"):
            abstract = {"outer": {"x": kept_in(kind, (4,), dtype), "large": ...}}
            with pytest.raises(errors.LossyCast, match="allow_lossy_casts") as caught:
                waystation.load(tmp_path / "checkpoint", abstract)
            assert caught.value.context["array"] == "outer.x"
        abstract = {"outer": {"x": ..., "large": kept_in(kind, (2,), "float16")}}
        with pytest.raises(errors.LossyCast, match=r"the value 1\.0000000150474662e\+30") as caught:
            waystation.load(tmp_path / "checkpoint", abstract)
        assert caught.value.context["array"] == "outer.large"


@pytest.mark.parametrize("kind", KINDS)
def test_the_option_allows_lossy_casts(tmp_path: Path, kind: str) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.float32([2.7, -1.5, 3e9, np.nan])})
    context = waystation.Context()
    context.array.loading.allow_lossy_casts = True
    with context, warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = waystation.load(tmp_path / "checkpoint", {"x": kept_in(kind, (4,), "int32")})["x"]
        halves = waystation.load(tmp_path / "checkpoint", {"x": kept_in(kind, (4,), "float16")})["x"]
    np.testing.assert_array_equal(np.asarray(whole), [2, -1, 2**31 - 1, 0])
    np.testing.assert_array_equal(np.asarray(halves), np.float16([2.7, -1.5, np.inf, np.nan]))


@pytest.mark.parametrize("use_ocdbt", LAYOUTS)
def test_no_save_changes_values_in_silence(tmp_path: Path, use_ocdbt: bool | None) -> None:
    context = waystation.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    context.array.saving.storage_options.dtype = "float16"
    state = {"x": np.float32([1e30, 1])}
    with context, pytest.raises(errors.LossyCast, match=r"array\.saving\.allow_lossy_casts") as caught:
        waystation.save(tmp_path / "checkpoint", state)
    assert caught.value.context["array"] == "x"
    context.array.saving.allow_lossy_casts = True
    with context:
        waystation.save(tmp_path / "checkpoint", state)
        np.testing.assert_array_equal(waystation.load(tmp_path / "checkpoint")["x"], [np.inf, 1])


def test_scalars_are_equal_or_refused(tmp_path: Path) -> None:
    waystation.save(
        tmp_path / "checkpoint", {"whole": 3.0, "part": 2.7, "large": 1e300, "none": float("nan")}
    )
    left_out = dict.fromkeys(("whole", "part", "large", "none"), ...)
    assert waystation.load(tmp_path / "checkpoint", left_out | {"whole": int})["whole"] == 3
    for name, wanted in [
        ("part", int),
        ("part", np.int32(0)),
        ("large", np.float32(0)),
        ("none", bool),
        ("none", int),
    ]:
        with pytest.raises(errors.InvalidInput) as caught:
            waystation.load(tmp_path / "checkpoint", left_out | {name: wanted})
        is_lossy = isinstance(caught.value, errors.LossyCast)
        assert caught.value.context["array"] == (name if is_lossy else f"['{name}']")


@pytest.mark.parametrize("kind", KINDS)
def test_published_tensors_round_or_are_refused(tmp_path: Path, kind: Any) -> None:
    waystation.safetensors.save(
        {"w": np.float32([1, 1e30]), "i": np.array([300])}, tmp_path / "m.safetensors"
    )
    for dtype, tensor in [
        ({"float32": "float16"}, "w"),
        ({"int64": "int8"}, "i"),
        ({"float32": "int8"}, "w"),
    ]:
        with pytest.raises(errors.LossyCast) as caught:
            waystation.safetensors.load(tmp_path / "m.safetensors", framework=kind, dtype=dtype)
        assert caught.value.context["tensor"] == tensor


def test_casts_on_devices_of_torch_are_checked() -> None:
    strict = CastRule(may_lose=False, option="the option")
    for stored, wanted in [("float32", "float16"), ("bfloat16", "float16"), ("float32", "bfloat16")]:
        tensor = torch.tensor([1, float("inf"), float("nan"), -2], dtype=getattr(torch, stored))
        found = torch_devices.cast(tensor, getattr(torch, wanted), strict)
        np.testing.assert_array_equal(found.float().numpy(), [1, np.inf, np.nan, -2])
        tensor[3] = torch.finfo(tensor.dtype).max
        with pytest.raises(errors.LossyCast, match="the option"):
            torch_devices.cast(tensor, getattr(torch, wanted), strict)
        lenient = CastRule(may_lose=True, option="the option")
        assert torch.isinf(torch_devices.cast(tensor, getattr(torch, wanted), lenient)[3])


@pytest.mark.parametrize(
    "abstract", [np.zeros(2, np.int32), torch.zeros(2, dtype=torch.int32)], ids=["numpy", "torch"]
)
def test_integers_never_wrap(tmp_path: Path, abstract: Any) -> None:
    waystation.save(tmp_path / "checkpoint", {"outer": {"x": np.array([1, 1 << 40])}})
    with pytest.raises(
        errors.InvalidInput,
        match="the value 1099511627776 was saved as int64, and int32 holds",
    ) as caught:
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
