"""States that are spread over meshes: their arrays, their shardings, and the topologies they change between.

Every mesh has the axes of Orbax's guide: `data` replicates, `fsdp` and `tensor` cut arrays. The pairs of
topologies are the guide's by name; the arrays are those of one or two layers at a quarter or half of the
model's widths, because all devices are those of one machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks import states
from benchmarks.states import Leaf

AXES = ("data", "fsdp", "tensor")
Mesh = tuple[int, int, int]
Spec = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Sharded:
    """An array and the mesh axis along which each of its axes is cut."""

    leaf: Leaf
    spec: Spec

    def block_bytes(self, mesh: Mesh) -> int:
        """Bytes of what one device holds."""
        extents = dict(zip(AXES, mesh, strict=True))
        return self.leaf.nbytes // math.prod(extents[axis] for axis in self.spec if axis is not None)


@dataclass(frozen=True, slots=True)
class Topology:
    """A state that is saved over one mesh and loaded over others.

    Attributes:
        model: The state.
        origin: The mesh that it is saved over; loading it so again is what others are compared with.
        targets: The meshes that it is loaded over.
        chunk_axis: The mesh axis along which the targets cut finer: what subchunks are cut along.
        processes: How many processes share the devices.
        source: Where the pair comes from.
    """

    model: str
    origin: Mesh
    targets: tuple[Mesh, ...]
    chunk_axis: str
    processes: int
    source: str

    def chunk_bytes(self, array: Sharded) -> int:
        """What to cut the chunks of an array to, so that no target needs a part of one."""
        extent = AXES.index(self.chunk_axis)
        finer = max(target[extent] for target in self.targets) // self.origin[extent]
        return max(1, array.block_bytes(self.origin) // max(1, finer))


_GUIDE = "the guide's blocks of 4 by 16 to 32 by 2, 256 times as wide and high"
_LLAMA_70B = "Llama 3.1 70B, v5p-256: two layers at a quarter of their width"
_LLAMA_8B = "Llama 3.1 8B, v5p-32: two layers at half of their width"

TOPOLOGIES = {
    "guide": Topology("square", (1, 8, 2), ((1, 1, 16),), "tensor", 1, _GUIDE),
    "guide, 4 processes": Topology("square", (1, 8, 2), ((1, 1, 16),), "tensor", 4, _GUIDE),
    "70B": Topology("llama-70b", (4, 8, 4), ((1, 128, 1), (1, 32, 1)), "fsdp", 1, _LLAMA_70B),
    "8B": Topology("llama-8b", (8, 2, 1), ((1, 16, 1), (1, 4, 1)), "fsdp", 1, _LLAMA_8B),
}


def describe(model: str, quick: bool) -> list[Sharded]:
    """The arrays of a state; `quick` gives the same structure with fewer bytes."""
    if model not in MODELS:
        raise ValueError(f"unknown model '{model}'; there are: {', '.join(MODELS)}")
    return list(MODELS[model](quick))


def total_bytes(arrays: list[Sharded]) -> int:
    return sum(array.leaf.nbytes for array in arrays)


def _square(quick: bool) -> Iterator[Sharded]:
    extent = 512 if quick else 8192
    for number in range(2):
        yield Sharded(Leaf(f"square{number}", (extent, extent), "float32"), ("fsdp", "tensor"))


def _llama(hidden: int, feed_forward: int, keys: int) -> Iterator[Sharded]:
    """Two layers of a decoder: widths of the model are cut by `fsdp`, heads and inner widths by `tensor`."""
    shapes: dict[str, tuple[tuple[int, ...], Spec]] = {
        "attention.query": ((hidden, hidden), ("fsdp", "tensor")),
        "attention.key": ((hidden, keys), ("fsdp", "tensor")),
        "attention.value": ((hidden, keys), ("fsdp", "tensor")),
        "attention.output": ((hidden, hidden), ("tensor", "fsdp")),
        "mlp.gate": ((hidden, feed_forward), ("fsdp", "tensor")),
        "mlp.up": ((hidden, feed_forward), ("fsdp", "tensor")),
        "mlp.down": ((feed_forward, hidden), ("tensor", "fsdp")),
        "norm_attention": ((hidden,), (None,)),
        "norm_mlp": ((hidden,), (None,)),
    }
    for layer in range(2):
        for name, (shape, spec) in shapes.items():
            yield Sharded(Leaf(f"layers.{layer}.{name}", shape, "bfloat16"), spec)


def _llama_70b(quick: bool) -> Iterator[Sharded]:
    return _llama(256, 896, 128) if quick else _llama(2048, 7168, 256)


def _llama_8b(quick: bool) -> Iterator[Sharded]:
    return _llama(256, 896, 128) if quick else _llama(2048, 7168, 512)


def _replicas(quick: bool) -> Iterator[Sharded]:
    """What every replica holds, cut among the devices of each."""
    extent = 512 if quick else 2048
    for number in range(8):
        yield Sharded(Leaf(f"weights{number}", (extent, extent), "float32"), ("fsdp", None))


def _one(quick: bool) -> Iterator[Sharded]:
    """The state of the raw limit, as it is spread over processes."""
    for leaf in states.describe("one", quick):
        yield Sharded(leaf, ("fsdp", None))


def _transformer(state: str, quick: bool) -> Iterator[Sharded]:
    """A model and its moments, each array cut along the first of its axes that many devices divide."""
    for leaf in states.describe(state, quick):
        cut = next((axis for axis, extent in enumerate(leaf.shape) if extent % 8 == 0), None)
        yield Sharded(leaf, tuple("fsdp" if axis == cut else None for axis in range(len(leaf.shape))))


def _tiny(quick: bool) -> Iterator[Sharded]:
    """What is saved and loaded before the clock starts."""
    del quick
    yield Sharded(Leaf("tiny", (128, 128), "float32"), ("fsdp", "tensor"))
    yield Sharded(Leaf("step", (), "int32"), ())


MODELS: dict[str, Callable[[bool], Iterator[Sharded]]] = {
    "square": _square,
    "llama-70b": _llama_70b,
    "llama-8b": _llama_8b,
    "replicas": _replicas,
    "one": _one,
    "tiny": _tiny,
    "transformer": partial(_transformer, "transformer"),
    "transformer-half-gb": partial(_transformer, "transformer-half-gb"),
}
