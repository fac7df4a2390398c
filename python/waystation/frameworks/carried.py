"""Leaves that are described already, and so need no codec of their framework.

An array that is saved by another process than the one whose framework it is of is *carried*: that one says
what it is and hands over its bytes; the one that saves need not have the framework, and the checkpoint says
the same as if it had been written there. An array that only some processes of a save have is *described* in
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from waystation.frameworks.base import ArraySource, Block, StoredArray
from waystation.grid import contiguous_strides
from waystation.tree import register_leaf


@dataclass(frozen=True, slots=True)
class CarriedArray:
    """An array of any framework, on its way.

    Attributes:
        stored: What a checkpoint is to say of it.
        item_bytes: Bytes of one element as it is stored.
        data: Its bytes as they are stored, in order.
    """

    stored: StoredArray
    item_bytes: int
    data: NDArray[np.uint8]

    def source(self) -> ArraySource:
        """The array as something to save."""
        stored = self.stored
        shape = stored.storage_shape
        block = Block(
            (0,) * len(shape),
            shape,
            contiguous_strides(shape, self.item_bytes),
            self.data.ctypes.data,
            self.data,
        )
        return ArraySource(
            stored.shape,
            stored.dtype,
            stored.framework,
            stored.storage_dtype,
            shape,
            stored.sharding,
            stored.extra,
            storage_item_bytes=self.item_bytes,
            blocks=[block],
            mutable=False,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DescribedArray:
    """An array that some processes of a save hold, or parts of it.

    Attributes:
        source: What is to be said of it, who holds what, and what this process holds, which may be nothing.
    """

    source: ArraySource


@dataclass(frozen=True, slots=True)
class AbstractKeys:
    """PRNG keys without their data, as they are asked for in another process.

    Attributes:
        shape: Of the array of keys.
        dtype: Its logical name, `key<implementation>`.
    """

    shape: tuple[int, ...]
    dtype: str


# Dataclasses would be taken apart as containers.
register_leaf(CarriedArray)
register_leaf(DescribedArray)
register_leaf(AbstractKeys)
