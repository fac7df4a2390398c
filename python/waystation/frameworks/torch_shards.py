"""Which elements of an array each process of a torch device mesh holds: pure arithmetic, without torch.

A mesh is an array of process numbers. Each of its axes either leaves an array as it is (replication) or
*splits* one axis of it; splits are applied in the order of the mesh's axes, each to what the ones before
have left. An axis is cut as `torch.chunk` cuts: pieces of equal extent, the last ones smaller or empty. A
split of several *pieces* (torch's `_StridedShard`) first cuts into those pieces and then each piece among
the processes, so that a process holds something of every piece, and several boxes in all.

Invariants: every process computes the same; the boxes of one process are disjoint and in the order in which
its local tensor holds them; those of different processes are disjoint or equal; empty boxes are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation.grid import Box, Shape, Spread, whole

# Elements that follow one another along an axis: `(begin, extent)`.
Run: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """How an axis of a mesh divides an array.

    Attributes:
        axis: The axis of the array that is divided.
        pieces: Into how many pieces it is cut before each is divided among the processes.
    """

    axis: int
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What one process holds of an array.

    Attributes:
        shape: Of the local tensor.
        boxes: Of the array, in the order of the local tensor; none if that has no elements.
        places: For each box its offset in the local tensor.
    """

    shape: Shape
    boxes: tuple[Box, ...]
    places: tuple[Shape, ...]


def local_shard(
    shape: Shape, mesh_shape: Shape, splits: Sequence[Split | None], coordinates: Sequence[int]
) -> LocalShard:
    """What the process at `coordinates` of a mesh holds.

    Args:
        shape: Of the array.
        mesh_shape: Of the mesh.
        splits: For each axis of the mesh how it divides the array; None replicates it.
        coordinates: Of the process.
    """
    cuts = _cuts(shape, mesh_shape, splits)
    return _shard([along.runs(coordinates) for along in cuts])


def spread_of(shape: Shape, ranks: NDArray[np.int64], splits: Sequence[Split | None]) -> Spread:
    """Which processes of a mesh hold which boxes of an array.

    Args:
        shape: Of the array.
        ranks: The mesh: the numbers of its processes.
        splits: For each axis of the mesh how it divides the array; None replicates it.
    """
    if not math.prod(shape):
        return replicated(shape, tuple(sorted(ranks.ravel().tolist())))
    dividing = [axis for axis, split in enumerate(splits) if split is not None]
    sizes = tuple(ranks.shape[axis] for axis in dividing)
    holders = np.moveaxis(ranks, dividing, range(len(dividing))).reshape(math.prod(sizes), -1)
    cuts = _cuts(shape, sizes, [splits[axis] for axis in dividing])
    boxes: list[Box] = []
    held_by: list[tuple[int, ...]] = []
    for coordinates, group in zip(np.ndindex(sizes), np.sort(holders, axis=1).tolist(), strict=True):
        for box in _boxes([along.runs(coordinates) for along in cuts]):
            boxes.append(box)
            held_by.append(tuple(group))
    return Spread(shape, tuple(boxes), tuple(held_by))


def replicated(shape: Shape, ranks: tuple[int, ...]) -> Spread:
    """The spread of an array that every one of `ranks` holds whole."""
    return Spread(shape, (whole(shape),), (ranks,))


# ---- one axis ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cut:
    """How one axis of an array is divided.

    Attributes:
        extent: Of the axis.
        steps: What divides it, one after another: an axis of the mesh, its size, and into how many pieces
            the axis is cut first.
    """

    extent: int
    steps: list[tuple[int, int, int]]
    _known: dict[tuple[int, ...], tuple[Run, ...]] = field(default_factory=dict)

    def runs(self, coordinates: Sequence[int]) -> tuple[Run, ...]:
        """What the process at `coordinates` has of the axis."""
        key = tuple([coordinates[step[0]] for step in self.steps])
        found = self._known.get(key)
        if found is None:
            runs = [(0, self.extent)] if self.extent else []
            for (_, size, pieces), index in zip(self.steps, key, strict=True):
                runs = _divide(runs, size, pieces, index)
            found = self._known[key] = tuple(runs)
        return found


def _cuts(shape: Shape, mesh_shape: Shape, splits: Sequence[Split | None]) -> list[_Cut]:
    cuts = [_Cut(extent, []) for extent in shape]
    for number, (size, split) in enumerate(zip(mesh_shape, splits, strict=True)):
        if split is not None:
            cuts[split.axis].steps.append((number, size, split.pieces))
    return cuts


def _divide(runs: Sequence[Run], size: int, pieces: int, index: int) -> list[Run]:
    """What is left of an axis for the process at `index` of `size`; runs that touch are joined."""
    extent = sum(length for _, length in runs)
    step = -(-extent // pieces)
    kept: list[Run] = []
    for start in range(0, extent, max(1, step)):
        length = min(step, extent - start)
        begin, share = _chunk(length, size, index)
        for run in _select(runs, start + begin, share):
            if kept and sum(kept[-1]) == run[0]:
                kept[-1] = kept[-1][0], kept[-1][1] + run[1]
            else:
                kept.append(run)
    return kept


def _chunk(extent: int, count: int, index: int) -> Run:
    """The part at `index` of an extent cut into `count` parts, as torch.chunk cuts it."""
    step = -(-extent // count)
    begin = min(index * step, extent)
    return begin, min(step, extent - begin)


def _select(runs: Sequence[Run], begin: int, extent: int) -> Iterator[Run]:
    """The elements from `begin` on of those that the runs hold together."""
    for start, length in runs:
        if begin < length and extent:
            taken = min(length - begin, extent)
            yield start + begin, taken
            extent -= taken
        begin = max(0, begin - length)


# ---- all axes ----------------------------------------------------------------------------------


def _shard(runs: Sequence[Sequence[Run]]) -> LocalShard:
    starts = [[0, *accumulate(extent for _, extent in along)] for along in runs]
    boxes = tuple(_boxes(runs))
    places = tuple(product(*(along[:-1] for along in starts)))
    return LocalShard(tuple(along[-1] for along in starts), boxes, places)


def _boxes(runs: Sequence[Sequence[Run]]) -> Iterator[Box]:
    """The boxes of a process; none if it has nothing along some axis."""
    for chosen in product(*runs):
        yield tuple([begin for begin, _ in chosen]), tuple([extent for _, extent in chosen])
