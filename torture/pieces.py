"""Arrays in pieces, of no framework: what JAX's arrays on several devices are to a save or a load, at a
hundredth of what those cost.

They are saved and loaded as arrays of any framework are, through a codec of their own, which is registered
when this is imported.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy.typing as npt

from waystation.frameworks import dtypes, registry
from waystation.frameworks.base import ArraySource, Codec, StoredArray, Target
from waystation.frameworks.numpy_arrays import host_block
from waystation.grid import Box, slices_of_box
from waystation.tree import register_leaf


@dataclass(frozen=True, eq=False)
class Pieces:
    """An array in pieces; without their values it asks a load for such a one.

    Attributes:
        shape, dtype: Of the array.
        boxes: Where its pieces lie, as offsets and shapes.
        values: Of each piece.
    """

    shape: tuple[int, ...]
    dtype: str
    boxes: list[Box]
    values: list[npt.NDArray[Any]] | None = None

    def with_values(self, whole: npt.NDArray[Any]) -> Pieces:
        """The pieces of an array."""
        return replace(self, values=[whole[slices_of_box(box)] for box in self.boxes])


class _Codec(Codec):
    """Pieces to blocks and back."""

    name = "pieces"

    def is_leaf(self, value: Any) -> bool:
        return isinstance(value, Pieces)

    def sources(self, leaves: Sequence[Any]) -> list[ArraySource]:
        return [_source(leaf) for leaf in leaves]

    def targets(self, abstracts: Sequence[Any], stored: Sequence[StoredArray]) -> list[Target]:
        del stored
        return [Target(each.shape, each.dtype, each.boxes, placement=each) for each in abstracts]

    def assemble(self, targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
        return [replace(target.placement, values=own) for target, own in zip(targets, boxes, strict=True)]


def _source(leaf: Pieces) -> ArraySource:
    logical = dtypes.of_name(leaf.dtype)
    assert leaf.values is not None
    trailing = (0,) * len(logical.trailing)
    return ArraySource(
        leaf.shape,
        logical.name,
        "pieces",
        logical.storage,
        logical.storage_shape(leaf.shape),
        storage_item_bytes=logical.storage_item_bytes,
        blocks=[
            host_block(values, logical, offset + trailing)
            for (offset, _), values in zip(leaf.boxes, leaf.values, strict=True)
        ],
        mutable=False,
    )


def cut(chance: random.Random, shape: Sequence[int]) -> list[Box]:
    """Boxes that cover a shape once: as even as they can be, or cut anywhere."""
    edges = [_edges(chance, size) for size in shape]
    return [
        (tuple(begin for begin, _ in parts), tuple(end - begin for begin, end in parts))
        for parts in product(*(list(pairwise(each)) for each in edges))
    ]


def _edges(chance: random.Random, size: int) -> list[int]:
    parts = min(size, chance.choice([1, 1, 1, 2, 2, 3, 8]))
    if chance.random() < 0.3:
        return [0, *sorted(chance.sample(range(1, size), parts - 1)), size]
    each = -(-size // parts)
    return [*range(0, size, each), size]


CODEC = _Codec()  # type: ignore[abstract]  # loads always say which pieces they want
register_leaf(Pieces)
registry._by_name[CODEC.name] = registry._by_type[Pieces] = CODEC
