"""What a tensor is to programs: its header in terms of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from waystation._errors import Unsupported
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.safetensors.headers import Tensor

PACKED = "float4_e2m1fn_x2"  # two elements to a byte

_MOST_AXES = 64  # of NumPy
_MOST_ITEMS = 1 << 59


def describe(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    """The shape and logical dtype of the array that a tensor becomes; of what no framework has, those in the
    header."""
    _, storage_dtype, shape, _, _ = tensor
    if storage_dtype == "F4" and shape and shape[-1] % 2 == 0:
        return (*shape[:-1], shape[-1] // 2), PACKED
    return shape, dtypes.name_of_storage(storage_dtype) or storage_dtype


def stored_as(tensor: Tensor) -> StoredArray:
    """A tensor as arrays are described.

    Raises:
        Unsupported: No framework has arrays that store their elements so.
    """
    _, storage_dtype, shape, _, _ = tensor
    # With an extent of 0 any others fit into no bytes, but not into what frameworks count in.
    if len(shape) > _MOST_AXES or math.prod(filter(None, shape)) > _MOST_ITEMS:
        raise Unsupported(f"no framework has arrays of the shape {shape}; leave the tensor out (select)")
    if storage_dtype == "F4":
        if not shape or shape[-1] % 2:
            raise Unsupported(
                f"a tensor of F4 with the shape {shape} does not fill whole bytes along its last axis, as "
                "frameworks want; leave it out (select)"
            )
        packed = (*shape[:-1], shape[-1] // 2)
        return StoredArray(packed, PACKED, "torch", "U8", (*packed, 1), None, {})
    logical = dtypes.name_of_storage(storage_dtype)
    if logical is None:
        raise Unsupported(
            f"a tensor of {storage_dtype} cannot be loaded, since no framework packs elements in this way; "
            "leave it out (select)"
        )
    return StoredArray(shape, logical, "numpy", storage_dtype, shape, None, {})


class Described(Sequence[StoredArray]):
    """Tensors as arrays are described, each when it is asked for: some may be of no use to anyone.

    Args:
        count: How many there are.
        array: Describes one of them by its number.
    """

    def __init__(self, count: int, array: Callable[[int], StoredArray]) -> None:
        self._count = count
        self._array = array

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return self._array(range(self._count)[number])
