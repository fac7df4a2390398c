"""Leaves that only describe an array: they have a shape and a dtype, and are of no framework.

Orbax's `AbstractArray` and `AbstractShardedArray` are protocols, which classes of users fulfil, often as
dataclasses. Such a value asks for a NumPy array, or with a sharding for a JAX array. So do types:
`numpy.ndarray` and `jax.Array` for an array of the stored shape and dtype, `numpy.int8` and its like for a
NumPy array of that dtype.

Invariant: a class that the program registered as a node, with this package or with JAX, is a node; so is
every tuple.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from waystation._errors import InvalidInput
from waystation.frameworks import registry
from waystation.frameworks.base import StoredArray
from waystation.frameworks.numpy_arrays import AbstractNumpy
from waystation.tree import is_registered


def is_described(value: Any) -> bool:
    """Whether a value describes an array, and no framework knows it."""
    if isinstance(value, type):
        return value is np.ndarray or value is _jax_array() or issubclass(value, np.generic)
    cls = type(value)
    if cls in _NEVER or registry.codec_for(value) is not None or issubclass(cls, tuple) or is_registered(cls):
        return False
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return False
    return _is_shape(value.shape) and not registry.is_jax_node(value)


def standing_for(value: Any, stored: StoredArray | None) -> Any:
    """The abstract leaf of a framework for a value that describes an array.

    Args:
        value: One that `is_described`.
        stored: What is stored, for what the value leaves open; None for what is no array.

    Raises:
        InvalidInput: Its shape or dtype is none, or it leaves open the dtype of an array with a sharding.
    """
    stored_shape = () if stored is None else tuple(stored.shape)
    if isinstance(value, type) and stored is not None and value is _jax_array():
        return registry.codec_by_name("jax").abstract(stored)
    if isinstance(value, type):
        return AbstractNumpy(stored_shape, None if value is np.ndarray else value)
    shape = stored_shape if value.shape is None else tuple(value.shape)
    sharding = getattr(value, "sharding", None)
    try:
        if sharding is None:
            return AbstractNumpy(shape, value.dtype)
        import jax

        return jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{value!r:.200} describes no array: {error}") from error


def _jax_array() -> Any:
    return getattr(sys.modules.get("jax"), "Array", None)


_NEVER = frozenset({bool, int, float, complex, str, bytes, type(None), type(...), dict, list})


def _is_shape(shape: Any) -> bool:
    if shape is None:
        return True
    return isinstance(shape, tuple | list) and all(hasattr(extent, "__index__") for extent in shape)
