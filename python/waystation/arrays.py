"""Names for arrays and what stands for them. JAX is imported when a function needs it."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

__all__ = [
    "AbstractArray",
    "AbstractScalar",
    "AbstractShardedArray",
    "ArrayLike",
    "DType",
    "Scalar",
    "Shape",
    "to_shape_dtype_struct",
]

Shape: TypeAlias = tuple[int, ...]
DType: TypeAlias = Any
Scalar: TypeAlias = int | float | np.number[Any] | bytes | bool
AbstractScalar: TypeAlias = Scalar


@runtime_checkable
class AbstractArray(Protocol):
    """An array without its data.

    Attributes:
        shape: The shape.
        dtype: The dtype.
    """

    shape: Shape | None
    dtype: DType | None


@runtime_checkable
class AbstractShardedArray(Protocol):
    """An array without its data, and where it is.

    Attributes:
        shape: The shape.
        dtype: The dtype.
        sharding: The sharding, or a format, which is one with the layout in memory.
    """

    shape: Shape | None
    dtype: DType | None
    sharding: Any


ArrayLike: TypeAlias = AbstractArray | AbstractShardedArray


def to_shape_dtype_struct(
    arr: Any, dtype: DType | None = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """The `jax.ShapeDtypeStruct` of an array, abstract or not; scalars stay what they are.

    PRNG keys keep their dtype, so that they are loaded as keys.

    Args:
        arr: A JAX or NumPy array, anything else with `shape`, `dtype` and perhaps `sharding`, or a scalar.
        dtype: Instead of the array's own.
        scalar_dtype: Called with a scalar to make another of it.
        support_format: Keep the layout in memory, too.

    Raises:
        InvalidInput: It is none of these.
    """
    from waystation.frameworks import jax_public

    return jax_public.to_shape_dtype_struct(arr, dtype, scalar_dtype, with_format=support_format)
