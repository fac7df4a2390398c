"""Host arrays as arrays of a framework, in the way of the safetensors package.

Invariants: host arrays that are given are given away, since what is made may alias them. Where JAX has no
64-bit floats, 32-bit ones take their place, as that package has it; values that would not fit are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation._options.in_effect import current_options
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import Codec, StoredArray


def dtype_held(framework: str, dtype: str) -> str:
    """The dtype that a framework has in place of one that it lacks for now."""
    if framework == "jax" and dtype == "float64":
        from waystation.frameworks import jax_dtypes

        return dtype if jax_dtypes.wide_enabled() else jax_dtypes.WIDE[dtype]
    return dtype


def narrowing(framework: str) -> dict[str, str] | None:
    """The same for all dtypes that change, as a load takes it."""
    held = dtype_held(framework, "float64")
    return None if held == "float64" else {"float64": held}


def made(
    codec: Codec, place: Any, stored: Sequence[StoredArray], arrays: Sequence[NDArray[Any]]
) -> list[Any]:
    """Arrays of a framework from host arrays of its dtypes.

    Args:
        codec: Of the framework.
        place: Where they go, as the codec has it.
        stored: What each is of; its shape counts for nothing.
        arrays: The host arrays.

    Raises:
        Unsupported: The framework has no such dtype.
    """
    described, held = [], []
    for tensor, array in zip(stored, arrays, strict=True):
        dtype = dtype_held(codec.name, tensor.dtype)
        logical = dtypes.of_name(dtype)
        held.append(array if dtype == tensor.dtype else _cast(array, logical.host))
        shape = tuple(array.shape)
        described.append(
            StoredArray(shape, dtype, codec.name, logical.storage, logical.storage_shape(shape), None, {})
        )
    targets = codec.placed(described, [array.dtype for array in described], [place] * len(held))
    return codec.assemble(targets, [[array] for array in held])


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    found = np.empty(array.shape, dtype)
    casts.copy(found, array, casts.rule_of_loads(current_options()))
    return found
