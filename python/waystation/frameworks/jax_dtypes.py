"""Logical dtypes as JAX has them: NumPy's and ml_dtypes', and the extended dtypes of PRNG keys."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from waystation._errors import Unsupported, UnsupportedLeaf
from waystation.frameworks import dtypes

# What JAX without 64-bit mode would narrow in silence.
WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}

_NOT_IN_JAX = frozenset({"complex32", "bcomplex32", "float4_e2m1fn_x2"})


@lru_cache(maxsize=256)
def logical_of(dtype: Any) -> dtypes.LogicalDtype:
    """The logical dtype of the dtype of a JAX array; of keys with the words that their data has."""
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtypes.of_numpy(np.dtype(dtype))
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise UnsupportedLeaf(
            f"cannot save arrays of the extended dtype {dtype}; save the numbers that they hold"
        )
    implementations: list[Any] = []

    def look(key: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    # Traced, not run: the public functions tell nothing about a dtype without a value of it.
    data = jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    if not isinstance(implementations[0], str):
        raise UnsupportedLeaf(
            f"the PRNG implementation of {dtype} is not registered by name; save its key_data"
        )
    return dtypes.key_dtype(implementations[0], tuple(data.shape))


@lru_cache(maxsize=256)
def jax_dtype(name: str) -> Any:
    """The dtype that JAX has for a logical name.

    Raises:
        Unsupported: JAX has none.
    """
    if dtypes.is_key(name):
        implementation = dtypes.key_implementation(name)
        try:
            return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
        except (TypeError, ValueError):
            raise Unsupported(
                f"this program knows no PRNG implementation {implementation!r}; register it with JAX "
                "before loading"
            ) from None
    if name in _NOT_IN_JAX or name.startswith("numpy:"):
        raise Unsupported(f"JAX has no dtype {name}; load it as NumPy or torch, or ask for another dtype")
    return dtypes.of_name(name).host


def wide_enabled() -> bool:
    """Whether 64-bit dtypes are enabled here and now: a setting of the thread."""
    return bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)
