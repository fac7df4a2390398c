"""What JAX arrays cannot be saved or loaded, and that the error says which and what to do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.frameworks.jax_mesh import mesh
from tests.frameworks.store import load, save

from waystation.errors import InvalidInput, Unsupported, UnsupportedLeaf
from waystation.frameworks import dtypes, registry
from waystation.frameworks.base import StoredArray


def codec() -> Any:
    return registry.codec_by_name("jax")


@pytest.mark.parametrize("end", ["delete", "donate"])
def test_deleted_arrays_are_named(end: str) -> None:
    array = jax.jit(lambda: jnp.arange(16.0))()
    if end == "delete":
        array.delete()
    else:
        jax.jit(lambda value: value + 1, donate_argnums=0)(array)
    with pytest.raises(InvalidInput, match=r"float32 \(16,\) has been deleted or donated") as raised:
        codec().sources([jnp.zeros(2), array])
    assert raised.value.context["index"] == 1


def test_tracers_are_refused_with_advice() -> None:
    @jax.jit
    def step(value: jax.Array) -> jax.Array:
        found = registry.codec_for(value)
        assert found is not None
        found.sources([value])
        return value

    with pytest.raises(UnsupportedLeaf, match="outside of jit"):
        step(jnp.zeros(2))


def test_abstract_leaves_cannot_be_saved() -> None:
    with pytest.raises(InvalidInput, match="abstract leaf"):
        save(jax.ShapeDtypeStruct((2,), np.float32))


def test_the_error_of_a_failed_computation_surfaces() -> None:
    # In a process of its own: JAX reports the failure once more when it shuts down.
    program = """
import os, jax, jax.numpy as jnp, numpy as np
from waystation.errors import InvalidInput
from waystation.frameworks import registry

def fail(value):
    raise ValueError("the callback broke")

@jax.jit
def slow(value):  # keeps the callback from running within the call
    for _ in range(4):
        value = value @ value * 1e-3
    return value

@jax.jit
def step(value):
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((2,), np.float32), value[0, :2])

pending = slow(jnp.ones((1500, 1500)))
broken = step(pending)
try:
    registry.codec_by_name("jax").sources([jnp.zeros(2), broken])
except InvalidInput as error:
    assert error.context["index"] == 1, error
    assert "computation of this array failed" in error.message and "the callback broke" in error.message
    os._exit(42)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 42


def test_partial_sums_are_unsupported() -> None:
    devices = mesh(2)
    axes = jax.sharding.Mesh(devices.devices, ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.set_mesh(axes):
        left = jax.device_put(jnp.ones((2, 4)), NamedSharding(axes, P(None, "x")))
        right = jax.device_put(jnp.ones((4, 2)), NamedSharding(axes, P("x", None)))
        partial = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=P(unreduced={"x"})))(
            left, right
        )
        with pytest.raises(UnsupportedLeaf, match="partial sums"):
            codec().sources([partial])


@pytest.mark.parametrize("dtype", ["numpy:<U5", "complex32", "float4_e2m1fn_x2"])
def test_dtypes_that_jax_lacks_are_unsupported(dtype: str) -> None:
    entry = dtypes.of_name(dtype)
    shape = entry.storage_shape((2,))
    stored = StoredArray((2,), dtype, "jax", entry.storage, shape, None, {})
    with pytest.raises(Unsupported, match="JAX has no dtype"):
        codec().default_targets([stored])


def test_an_indivisible_sharding_is_refused() -> None:
    abstract = jax.ShapeDtypeStruct((6,), np.float32, sharding=NamedSharding(mesh(4), P("x")))
    with pytest.raises(InvalidInput, match="cannot have"):
        load(save(np.zeros(6, np.float32)), abstract)


def test_an_abstract_mesh_is_refused() -> None:
    sharding = NamedSharding(mesh(4).abstract_mesh, P("x"))
    with pytest.raises(InvalidInput, match="abstract mesh"):
        load(save(np.zeros(4, np.float32)), jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding))
