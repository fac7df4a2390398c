"""How an array is cut in storage, as metadata show it (`storage_metadata` of an abstract array)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageMetadata:
    """How an array is cut in storage.

    Attributes:
        chunk_shape: Of the least part that is read as a whole; None where chunks differ in shape.
        write_shape: Of what was written as a whole: the shard of a device, or more.
    """

    chunk_shape: Shape | None
    write_shape: Shape | None

    @classmethod
    def of(cls, shape: Shape, chunk_shape: Shape | None, sharding: dict[str, Any] | None) -> StorageMetadata:
        """What chunks of a shape say of an array that was saved with a sharding (as described)."""
        if chunk_shape is None:
            return cls(None, None)
        shard = shard_shape(shape, sharding)
        is_cut = all(part <= whole for part, whole in zip(chunk_shape, shard, strict=True))
        return cls(chunk_shape, shard if is_cut else chunk_shape)


# Asked for when somebody looks: a state may have tens of thousands of arrays.
Storage: TypeAlias = Callable[[], StorageMetadata]


def shard_shape(shape: Shape, sharding: dict[str, Any] | None) -> Shape:
    """The shape of a device's shard by the description of a sharding; the whole where that does not say."""
    if sharding is None or sharding.get("kind") != "named":
        return shape
    sizes = dict(sharding["mesh"]["axes"])
    extents = list(shape)
    for axis, part in enumerate(sharding["spec"]):
        names = [] if part is None else [part] if isinstance(part, str) else part
        extents[axis] = -(-extents[axis] // math.prod(sizes[name] for name in names))
    return tuple(extents)
