"""Random states that genuine Orbax can save: trees, leaves of every kind, shardings over eight devices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)),
    "int4",
    "int2",
    "float16",
    "float32",
    "bfloat16",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
)
# Not in JAX without its 64-bit mode.
WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")
KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg")
_NARROW = {"int4": (-8, 8), "int2": (-2, 2)}


class Pair(NamedTuple):
    """A container that Orbax stores as a dict."""

    first: Any
    second: Any


def values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """An array of any bits."""
    generator = np.random.default_rng(seed)
    host = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype in _NARROW:
        return generator.integers(*_NARROW[dtype], shape).astype(host)
    if dtype == "float4_e2m1fn":
        return generator.integers(0, 16, shape).astype(np.uint8).view(host)
    return np.frombuffer(generator.bytes(math.prod(shape) * host.itemsize), host).reshape(shape)


_shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
_seeds = st.integers(0, 1 << 32)


@st.composite
def _placements(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    """A shape and a sharding that divides it."""
    sizes = draw(st.sampled_from([(8,), (4, 2), (2, 2), (2, 2, 2), (1, 3)]))
    names = ("x", "y", "z")[: len(sizes)]
    devices = np.array(jax.devices()[: math.prod(sizes)])
    mesh = Mesh(draw(st.permutations(devices.tolist()).map(np.array)).reshape(sizes), names)
    rank = draw(st.integers(0, 3))
    axes = draw(st.permutations(names))
    parts: list[list[str]] = [[] for _ in range(rank)]
    for axis in axes:
        at = draw(st.integers(-1, rank - 1))
        if at >= 0:
            parts[at].append(axis)
    spec = [tuple(part) if len(part) > 1 else part[0] if part else None for part in parts]
    shape = tuple(
        draw(st.integers(1, 3)) * math.prod(sizes[names.index(axis)] for axis in part) for part in parts
    )
    return shape, NamedSharding(mesh, PartitionSpec(*spec))


@st.composite
def jax_arrays(draw: st.DrawFn) -> jax.Array:
    """A JAX array on one device or sharded, or keys."""
    if draw(st.integers(0, 9)) == 0:
        seed, implementation = draw(_seeds), draw(st.sampled_from(KEY_IMPLEMENTATIONS))
        key = jax.random.key(seed, impl=implementation)
        return draw(st.sampled_from([key, jax.random.split(key, (2, 3))]))
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        shape, sharding = draw(_placements())
    else:
        shape, sharding = draw(_shapes), SingleDeviceSharding(draw(st.sampled_from(jax.devices())))
    return jax.device_put(values(shape, dtype, draw(_seeds)), sharding)


@st.composite
def numpy_arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """A NumPy array."""
    dtype = draw(st.sampled_from((*DTYPES, *WIDE_DTYPES)))
    return values(draw(_shapes), dtype, draw(_seeds))


scalars = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1), st.floats(allow_nan=False), st.booleans(), st.text(max_size=8)
)
empties = st.sampled_from([None, (), [], {}])
leaves = st.one_of(jax_arrays(), jax_arrays(), numpy_arrays(), scalars, empties)
# Orbax joins keys by dots, and a key with a slash is a directory of its own.
keys = st.text(st.sampled_from("abcXY01_- ÄΩ"), min_size=1, max_size=4).filter(lambda key: key.strip() == key)


def trees() -> st.SearchStrategy[Any]:
    """A dict of anything."""
    inner = st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, min_size=1, max_size=3),
            st.lists(children, min_size=1, max_size=3).map(tuple),
            st.dictionaries(keys, children, min_size=1, max_size=3),
            st.builds(Pair, children, children),
        ),
        max_leaves=6,
    )
    return st.dictionaries(keys, inner, min_size=1, max_size=3).filter(_has_leaves)


def _has_leaves(tree: Any) -> bool:
    return bool(jax.tree.leaves(tree))
