"""How an array lies on the devices of a slice: a mesh, its axis names, a partition spec; without JAX.

The devices of a slice fill the mesh in order, its last axis fastest. Invariants: as for `jax.sharding
.NamedSharding` under `jit`, every axis of an array is divided evenly; so the distinct shards are the chunks
of a regular grid, and a sharding is as small for 2,048 devices as for 4.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from waystation._errors import InvalidInput
from waystation.grid import Box, Shape

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Sharding:
    """A mesh and a partition spec.

    Attributes:
        axes: Name and size of each axis of the mesh, major to minor.
        spec: For each axis of the array the axes of the mesh that divide it, major to minor. Axes of the
            array beyond the spec are not divided; axes of the mesh that it does not name hold replicas.
    """

    axes: tuple[tuple[str, int], ...]
    spec: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        sizes = dict(self.axes)
        used = [name for part in self.spec for name in part]
        if len(sizes) != len(self.axes) or any(size < 1 for size in sizes.values()):
            raise InvalidInput(
                f"the axes {self.axes} of a mesh must have different names and sizes of 1 or more"
            )
        if not all(NAME.fullmatch(name) for name in sizes):
            raise InvalidInput(
                f"the axes {list(sizes)} of a mesh need names of letters, digits and underscores"
            )
        if not set(used) <= sizes.keys() or len(set(used)) != len(used):
            raise InvalidInput(
                f"the spec {self.spec} must name axes of the mesh {list(sizes)}, each once at most"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Calls are looked up by the shardings of what they are given, again and again.
        return hash((self.axes, self.spec))

    def __reduce__(self) -> tuple[type[Sharding], tuple[object, ...]]:
        return Sharding, (self.axes, self.spec)  # hashes of strings are of one process

    @cached_property
    def device_count(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(size for _, size in self.axes)

    def divisions(self, ndim: int) -> Shape:
        """Into how many parts each axis of an array is divided.

        Raises:
            InvalidInput: The spec has more parts than the array has axes.
        """
        if len(self.spec) > ndim:
            raise InvalidInput(f"the spec {self.spec} has {len(self.spec)} parts, the array {ndim} axes")
        sizes = dict(self.axes)
        found = tuple(math.prod(sizes[name] for name in part) for part in self.spec)
        return found + (1,) * (ndim - len(found))

    def shard_shape(self, shape: Shape) -> Shape:
        """The shape of every shard of an array.

        Raises:
            InvalidInput: An axis cannot be divided evenly.
        """
        divisions = self.divisions(len(shape))
        if any(extent % parts for extent, parts in zip(shape, divisions, strict=True)):
            raise InvalidInput(f"an array of shape {shape} cannot be divided evenly into {divisions} parts")
        return tuple(extent // parts for extent, parts in zip(shape, divisions, strict=True))

    def boxes(self, shape: Shape) -> tuple[Box, ...]:
        """The shard of each device, in the order of the mesh.

        Raises:
            InvalidInput: An axis cannot be divided evenly.
        """
        return _boxes(self, shape)

    def box(self, place: int, extents: Shape) -> Box:
        """The shard of one device, by its place in the mesh; `extents` is the shape of every shard."""
        at: dict[str, tuple[int, int]] = {}
        for name, size in reversed(self.axes):
            place, coordinate = divmod(place, size)
            at[name] = coordinate, size
        offset = []
        parts = self.spec + ((),) * (len(extents) - len(self.spec))
        for part, extent in zip(parts, extents, strict=True):
            index = 0
            for name in part:
                coordinate, size = at[name]
                index = index * size + coordinate
            offset.append(index * extent)
        return tuple(offset), extents


@lru_cache(maxsize=64)
def _boxes(sharding: Sharding, shape: Shape) -> tuple[Box, ...]:
    """Kept, since the values of a program have few shardings and shapes between them."""
    extents = sharding.shard_shape(shape)
    return tuple(sharding.box(place, extents) for place in range(sharding.device_count))


def replicated(device_count: int, axis: str = "devices") -> Sharding:
    """The sharding that gives every device the whole array."""
    return Sharding(((axis, device_count),))
