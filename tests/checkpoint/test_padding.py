"""Arrays wanted with other extents: what both shapes share comes back, zeros beyond; or a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.support.long import amount

import waystation
from waystation import errors
from waystation.frameworks import AbstractNumpy

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

DTYPES = (
    "bool",
    "int8",
    "uint16",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "float8_e4m3fn",
    "int4",
    "complex64",
)
MESH_SIZES = {"x": 2, "y": 4}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def padding() -> waystation.Context:
    context = waystation.Context()
    context.array.loading.enable_padding_and_truncation = True
    return context


def fitted(values: Array, shape: Shape, dtype: np.dtype[Any]) -> Array:
    """The oracle: zeros, with what both shapes share."""
    expected = np.zeros(shape, dtype)
    common = tuple(slice(0, min(have, want)) for have, want in zip(values.shape, shape, strict=True))
    expected[common] = values[common].astype(dtype)
    return expected


def pattern(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Values that every dtype holds, none of them zero."""
    count = int(np.prod(shape))
    return (np.arange(count) % 3 + 1).astype(np.float32).reshape(shape).astype(dtype)


@st.composite
def partitions(draw: st.DrawFn, axes: int) -> list[tuple[str, ...]]:
    """Which axes of the mesh divide each axis of an array."""
    free = draw(st.permutations(sorted(MESH_SIZES)))
    owners = [draw(st.integers(0, axes)) for _ in free]  # the last number leaves a mesh axis out
    return [
        tuple(name for name, owner in zip(free, owners, strict=True) if owner == axis) for axis in range(axes)
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Shape, list[tuple[str, ...]], str, str]:
    axes = draw(st.integers(1, 3))
    spec = draw(partitions(axes))
    stored = tuple(draw(st.integers(0, 9)) for _ in range(axes))
    factors = [int(np.prod([MESH_SIZES[name] for name in part] or [1])) for part in spec]
    wanted = tuple(factor * draw(st.integers(0, 3)) for factor in factors)
    kept = draw(st.sampled_from(DTYPES))
    cast = (
        kept if kept in ("bool", "complex64") else draw(st.sampled_from([kept, kept, "float32", "bfloat16"]))
    )
    return stored, wanted, spec, kept, cast


@settings(max_examples=amount(50, 3000))
@given(case=cases(), private=st.booleans())
def test_every_shape_and_sharding_is_as_numpy_would_have_it(
    case: tuple[Shape, Shape, list[tuple[str, ...]], str, str], private: bool, tmp_path_factory: Any
) -> None:
    stored, wanted, spec, kept, cast = case
    values = pattern(stored, dtype_of(kept))
    path = tmp_path_factory.mktemp("padding") / "checkpoint"
    waystation.save(path, {"x": values, "same": np.arange(3)})
    sharding = NamedSharding(jax.make_mesh((2, 4), ("x", "y")), PartitionSpec(*spec))
    abstracts: list[Any] = [
        jax.ShapeDtypeStruct(wanted, dtype_of(cast), sharding=sharding),
        AbstractNumpy(wanted, dtype_of(cast)),
    ]
    if isinstance(getattr(torch, cast, None), torch.dtype) and cast != "int4":
        abstracts.append(torch.empty(wanted, dtype=getattr(torch, cast), device="meta"))
    context = padding()
    context.array.loading.mmap = private
    with context:
        for abstract in abstracts:
            loaded = waystation.load(path, {"x": abstract, "same": AbstractNumpy((3,))})
            np.testing.assert_array_equal(loaded["same"], np.arange(3))
            compare(loaded["x"], fitted(values, wanted, dtype_of(cast)))
            if isinstance(abstract, jax.ShapeDtypeStruct):
                assert loaded["x"].sharding == sharding


def compare(found: Any, expected: Array) -> None:
    if isinstance(found, torch.Tensor):
        number = torch.complex64 if found.is_complex() else torch.float32
        np.testing.assert_array_equal(found.to(number).numpy(), expected.astype(str(number).split(".")[1]))
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found), expected)
    assert tuple(found.shape) == expected.shape


def test_shards_beyond_the_stored_array_are_zeros(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": jnp.ones((6,))})
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    with padding():
        loaded = waystation.load(
            tmp_path / "checkpoint", {"x": jax.ShapeDtypeStruct((32,), jnp.float32, sharding=sharding)}
        )["x"]
    parts = [np.asarray(shard.data).tolist() for shard in loaded.addressable_shards]
    assert parts == [[1, 1, 1, 1], [1, 1, 0, 0], *[[0, 0, 0, 0]] * 6]


@pytest.mark.parametrize("dtype", ["<U5", "S3", "datetime64[s]", ">i4", "complex128"])
def test_numpy_dtypes_of_every_kind(tmp_path: Path, dtype: str) -> None:
    values = np.array([1, 2, 3]).astype(dtype)
    waystation.save(tmp_path / "checkpoint", {"x": values})
    with padding():
        longer = waystation.load(tmp_path / "checkpoint", {"x": AbstractNumpy((5,))})["x"]
        shorter = waystation.load(tmp_path / "checkpoint", {"x": AbstractNumpy((2,))})["x"]
    np.testing.assert_array_equal(longer, np.concatenate([values, np.zeros(2, dtype)]))
    np.testing.assert_array_equal(shorter, values[:2])


def test_mapped_arrays_are_read_where_their_extents_differ(tmp_path: Path) -> None:
    values = np.arange(4096, dtype=np.float32)
    waystation.save(tmp_path / "checkpoint", {"x": values, "y": values})
    context = padding()
    context.array.loading.mmap = True
    with context:
        abstract = {"x": AbstractNumpy((2048,)), "y": AbstractNumpy((8192,))}
        loaded = waystation.load(tmp_path / "checkpoint", abstract)
    np.testing.assert_array_equal(loaded["x"], values[:2048])
    np.testing.assert_array_equal(loaded["y"], fitted(values, (8192,), values.dtype))


def test_only_what_is_shared_is_read(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.ones((1024, 1024), np.float32)})
    seen: list[waystation.checkpoint.LoadStatistics] = []
    context = padding()
    context.array.loading.on_statistics = seen.append
    with context:
        waystation.load(tmp_path / "checkpoint", {"x": AbstractNumpy((16, 2048))})
    assert seen[0].bytes_needed == 16 * 1024 * 4
    assert seen[0].bytes_read < 1 << 20


def test_without_the_option_the_error_names_both_shapes_and_the_option(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"outer": {"x": np.zeros((4, 5))}, "y": np.zeros(3)})
    abstract = {"outer": {"x": AbstractNumpy((4, 7))}, "y": AbstractNumpy((3,))}
    with pytest.raises(errors.StructureMismatch) as caught:
        waystation.load(tmp_path / "checkpoint", abstract)
    text = str(caught.value)
    assert "['outer']['x']: shape (4, 5) in the checkpoint, shape (4, 7) wanted" in text
    assert "array.loading.enable_padding_and_truncation" in text
    assert "['y']" not in text


def test_another_number_of_axes_stays_an_error(tmp_path: Path) -> None:
    waystation.save(tmp_path / "checkpoint", {"x": np.zeros((4, 5)), "y": np.zeros((4, 5)), "z": 3})
    abstract = {"x": AbstractNumpy((20,)), "y": AbstractNumpy((4, 6)), "z": AbstractNumpy((1,))}
    with padding(), pytest.raises(errors.StructureMismatch) as caught:
        waystation.load(tmp_path / "checkpoint", abstract)
    text = str(caught.value)
    assert "['x']: shape (4, 5) in the checkpoint, shape (20,) wanted" in text
    assert "['z']: a number (shape ()) in the checkpoint, shape (1,) wanted" in text
    assert "['y']" not in text
    assert "enable_padding_and_truncation" not in text
    with pytest.raises(errors.StructureMismatch, match=r"\(20,\)") as caught:
        waystation.load(tmp_path / "checkpoint", abstract)
    assert "['y']" in str(caught.value)


@pytest.mark.parametrize("count", [2, 8])
def test_keys_are_refused(tmp_path: Path, count: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    waystation.save(tmp_path / "checkpoint", {"outer": {"keys": keys}})
    abstract = {"outer": {"keys": jax.ShapeDtypeStruct((count,), keys.dtype)}}
    with padding(), pytest.raises(errors.InvalidInput, match="PRNG keys") as caught:
        waystation.load(tmp_path / "checkpoint", abstract)
    assert caught.value.context["array"] == "['outer']['keys']"


def test_the_option_takes_nothing_but_true_and_false() -> None:
    context = waystation.Context()
    with pytest.raises(errors.InvalidInput, match="enable_padding_and_truncation"):
        context.array.loading.enable_padding_and_truncation = 1  # type: ignore[assignment]
