"""Names for arrays and what stands for them."""

from __future__ import annotations

from typing import Any, TypeAlias

from waystation.frameworks import jax_public

__all__ = ["Index", "Shape", "to_shape_dtype_struct"]

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[slice, ...]


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """The `jax.ShapeDtypeStruct` of an array, or of metadata of one; numbers stay what they are.

    Args:
        arr: The array.
        dtype: Instead of the array's own.
        scalar_dtype: Called with a number to make another of it.
        support_format: Keep the layout in memory, too.

    Raises:
        ValueError: It is none of these.
    """
    sharding: Any = getattr(arr, "sharding", None)
    if hasattr(sharding, "to_jax_sharding"):  # metadata of an array
        arr = _Described(arr.shape, arr.dtype, sharding.to_jax_sharding())
    elif isinstance(arr, str | bytes):
        arr = object()
    return jax_public.to_shape_dtype_struct(arr, dtype, scalar_dtype, with_format=support_format)


class _Described:
    def __init__(self, shape: Any, dtype: Any, sharding: Any) -> None:
        self.shape, self.dtype, self.sharding = shape, dtype, sharding
