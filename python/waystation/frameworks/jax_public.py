"""What the public modules need of JAX: abstract arrays of values, and on what kind of system it runs."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import numpy as np

from waystation._errors import InvalidInput

_SCALARS = (bool, int, float, complex, np.number, np.bool_, str, bytes)


def to_shape_dtype_struct(arr: Any, dtype: Any = None, scalar_dtype: Any = None, *, with_format: bool) -> Any:
    """See `waystation.arrays.to_shape_dtype_struct`."""
    if isinstance(arr, _SCALARS):
        return arr if scalar_dtype is None else scalar_dtype(arr)
    if not hasattr(arr, "shape") or not hasattr(arr, "dtype"):
        raise InvalidInput(f"a {type(arr).__name__} has no shape and dtype; give an array or a scalar")
    sharding = getattr(arr, "format" if with_format else "sharding", None)
    return jax.ShapeDtypeStruct(tuple(arr.shape), arr.dtype if dtype is None else dtype, sharding=sharding)


# jaxlib has no types, so `jax.Device` is one of which checkers know nothing.
Device: TypeAlias = Any


def is_pathways_backend() -> bool:
    """Whether JAX runs its programs through Pathways."""
    client: Any = jax.devices()[0].client
    kind = str(getattr(client, "runtime_type", ""))
    return hasattr(client, "pathways") or kind in ("pathways", "proxy/pathways")


def record_duration(event: str, seconds: float) -> None:
    """Tells JAX's monitoring how long something took."""
    jax.monitoring.record_event_duration_secs(event, seconds)
