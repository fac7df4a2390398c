"""Which processes hold which boxes of an array, and which of them writes what: *replica-parallel* sharing.

Every process computes its own share alone, and all come to a partition: no box is written twice or not at
all. Boxes that several processes hold are cut along their first axis that can be cut, one slice for each
holder; those too small for that go whole to the holder that has been given the fewest bytes so far.

Invariants: shares depend only on spreads, their order and the settings, which are the same everywhere; a
slice is contiguous in its box; a process looks only at boxes that it holds itself, so the cost does not
grow with the processes that share nothing with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from waystation.grid._boxes import Box, Shape, volume


@dataclass(frozen=True, slots=True)
class Spread:
    """Which processes hold which boxes of an array; arrays of one shape and sharding share one.

    Attributes:
        array_shape: Shape of the array.
        boxes: The distinct boxes; together they cover the array.
        holders: For each box the processes that hold it, ascending.
    """

    array_shape: Shape
    boxes: tuple[Box, ...]
    holders: tuple[tuple[int, ...], ...]

    def among(self, processes: Sequence[int]) -> Spread:
        """The same array as if there were only these processes, numbered from 0 on in the order given. A box
        that none of them holds has no holders."""
        numbers = {process: number for number, process in enumerate(processes)}
        holders = tuple(
            tuple(numbers[process] for process in own if process in numbers) for own in self.holders
        )
        return Spread(self.array_shape, self.boxes, holders)


@dataclass(slots=True)
class Sharing:
    """Gives one process its share of array after array.

    Attributes:
        process: The process.
        min_slice_bytes: A box is cut into slices of at least so many bytes.
        most_slices: A box is cut into at most so many slices.
    """

    process: int
    min_slice_bytes: int
    most_slices: int
    # Bytes given so far to the members of each group of holders.
    _given: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict)
    _own: dict[int, tuple[Spread, list[int]]] = field(default_factory=dict)

    def share(self, spread: Spread, item_bytes: int) -> list[Box]:
        """The boxes of the next array that this process writes, in the order of the spread's."""
        found = []
        for number in self._own_boxes(spread):
            box, holders = spread.boxes[number], spread.holders[number]
            share = box if len(holders) == 1 else self._slice(box, holders, item_bytes)
            if share is not None and volume(share):
                found.append(share)
        return found

    def _own_boxes(self, spread: Spread) -> list[int]:
        # A spread is kept beside its boxes, so that no other can come to have its identity.
        known = self._own.get(id(spread))
        if known is None:
            own = [number for number, holders in enumerate(spread.holders) if self.process in holders]
            known = self._own[id(spread)] = spread, own
        return known[1]

    def _slice(self, box: Box, holders: tuple[int, ...], item_bytes: int) -> Box | None:
        given = self._given.get(holders)
        if given is None:
            given = self._given[holders] = np.zeros(len(holders), np.int64)
        nbytes = volume(box) * item_bytes
        axis = next((axis for axis, extent in enumerate(box[1]) if extent > 1), None)
        wanted = min(len(holders), self.most_slices, max(1, nbytes // self.min_slice_bytes))
        if axis is None or wanted == 1:
            owner = int(np.argmin(given))
            given[owner] += nbytes
            return box if holders[owner] == self.process else None
        extent = box[1][axis]
        step = -(-extent // min(wanted, extent))
        count = -(-extent // step)
        # The members that have been given least; all of them, in their own order, where all take part.
        members = np.sort(given.argsort(kind="stable")[:count])
        ends = np.minimum(np.arange(1, count + 1) * step, extent)
        given[members] += np.diff(ends, prepend=0) * (nbytes // extent)
        place = np.flatnonzero(members == holders.index(self.process))
        if not place.size:
            return None
        begin = int(place[0]) * step
        offset, shape = list(box[0]), list(box[1])
        offset[axis] += begin
        shape[axis] = min(step, extent - begin)
        return tuple(offset), tuple(shape)
