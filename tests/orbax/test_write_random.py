"""Random trees over random shardings, in every layout that we write: genuine Orbax loads what was saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from tests.orbax import oracle, writing
from tests.orbax.test_write import LAYOUTS
from tests.support.long import amount

from waystation.checkpoint import verify

DTYPES = ["float32", "bfloat16", "int8", "uint16", "bool", "complex64", "int4", "float8_e4m3fn"]
MESHES = [(8,), (4, 2), (2, 2, 2), (2, 4), (1, 8)]
KEYS = st.text("abcxyz_-0123456789 ", min_size=1, max_size=6).filter(lambda key: key.strip(" "))


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> NamedSharding:
    """A sharding that divides an array of `shape` evenly."""
    sizes = draw(st.sampled_from(MESHES))
    names = tuple(f"m{axis}" for axis in range(len(sizes)))
    mesh = jax.make_mesh(sizes, names)
    unused = list(draw(st.permutations(range(len(sizes)))))
    spec: list[Any] = []
    for extent in shape:
        own: list[str] = []
        left = extent
        while unused and left % sizes[unused[-1]] == 0 and draw(st.booleans()):
            axis = unused.pop()
            left //= sizes[axis]
            own.append(names[axis])
        spec.append(tuple(own) if len(own) > 1 else own[0] if own else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """A JAX array with some sharding, or a NumPy array."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 24]), max_size=3)))
    dtype = jax.numpy.dtype(draw(st.sampled_from(DTYPES)))
    values = np.random.default_rng(draw(st.integers(0, 9))).integers(-8, 8, shape).astype(dtype)
    return values if draw(st.booleans()) else jax.device_put(values, draw(shardings(shape)))


LEAVES = st.one_of(
    arrays(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=20),
    st.none(),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@settings(
    max_examples=amount(2, 300),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(tree=st.dictionaries(KEYS, TREES, min_size=1, max_size=4), chunk_bytes=st.sampled_from([None, 4, 64]))
@pytest.mark.share(8)
def test_orbax_loads_random_states_as_its_own(
    layout: dict[str, Any], tree: dict[str, Any], chunk_bytes: int | None, tmp_path: Path
) -> None:
    for name in ("ours", "theirs"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    oracle.save(tmp_path / "theirs", {**tree, "one": np.ones(1)}, **layout)
    writing.save(tmp_path / "ours", {**tree, "one": np.ones(1)}, chunk_bytes=chunk_bytes, **layout)
    expected = oracle.load(tmp_path / "theirs")
    oracle.assert_same(oracle.load(tmp_path / "ours"), expected)
    oracle.assert_same(oracle.ours(tmp_path / "ours"), expected)
    found = verify(tmp_path / "ours")
    assert (found.damages, found.strays) == ([], [])


@settings(
    max_examples=amount(10, 500),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_sharding_to_any_other(data: st.DataObject, tmp_path: Path) -> None:
    layout = data.draw(st.sampled_from(list(LAYOUTS.values())))
    saved = data.draw(st.lists(arrays(), min_size=1, max_size=4))
    shutil.rmtree(tmp_path / "ours", ignore_errors=True)
    writing.save(tmp_path / "ours", saved, **layout)
    wanted = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=data.draw(shardings(leaf.shape)))
        for leaf in saved
    ]
    loaded = oracle.load(tmp_path / "ours", wanted)
    for found, leaf, want in zip(loaded, saved, wanted, strict=True):
        assert found.sharding == want.sharding
        writing.assert_same_bits(found, leaf)
