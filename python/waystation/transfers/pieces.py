"""Arrays of a checkpoint piece by piece, for whoever looks at all of them in bounded memory.

Invariants: the pieces of an array come in C order, and each is contiguous in it, so that their bytes one
after another are the array's; small arrays are read many at a time, large ones in parts; while one group
of pieces is used the next is read, so at most two groups are in memory.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from waystation import _forks
from waystation._options import Options
from waystation._threads import Threads
from waystation.frameworks import dtypes
from waystation.grid import Box
from waystation.layouts.native import memory
from waystation.layouts.opened import Opened, ReadStatistics, Request

GROUP_BYTES = 32 << 20

Values = np.ndarray[Any, Any]
Group = TypeVar("Group")
Loaded = TypeVar("Loaded")


class Sized(Protocol):
    """Something that takes so many bytes."""

    @property
    def nbytes(self) -> int:
        """The bytes."""
        ...


AnySized = TypeVar("AnySized", bound=Sized)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of one of the arrays that were given to `group_parts`, by its place among them."""

    index: int
    box: Box


def group_parts(
    shapes: Sequence[tuple[int, ...]], item_bytes: Sequence[int], group_bytes: int = GROUP_BYTES
) -> Iterator[list[Part]]:
    """Cuts arrays into parts and puts these into groups of at most `group_bytes`.

    An element is never cut, so a group of one element may be larger. Arrays without elements have no part.
    """
    group: list[Part] = []
    held = 0
    for index, (shape, size) in enumerate(zip(shapes, item_bytes, strict=True)):
        for box in cut(shape, max(1, group_bytes // max(1, size))):
            nbytes = math.prod(box[1]) * size
            if group and held + nbytes > group_bytes:
                yield group
                group, held = [], 0
            group.append(Part(index, box))
            held += nbytes
    if group:
        yield group


def cut(shape: tuple[int, ...], most_items: int) -> Cut:
    """Boxes of at most `most_items` elements that cover an array in C order, each contiguous in it."""
    return Cut(shape, most_items)


class Cut:
    """An array cut into boxes in C order, each contiguous in it, and made when it is asked for: an array may
    have millions of them. See `cut`."""

    def __init__(self, shape: tuple[int, ...], most_items: int) -> None:
        axis = 0  # along which to cut: the first whose slices are small enough
        while axis < len(shape) and math.prod(shape[axis + 1 :]) > most_items:
            axis += 1
        self._shape = shape
        self._axis = axis
        self._is_whole = axis == len(shape) or math.prod(shape) <= most_items
        inner = math.prod(shape[axis + 1 :])
        self._step = 1 if self._is_whole else max(1, most_items // inner)
        self._in_row = 1 if self._is_whole else -(-shape[axis] // self._step)
        rows = 1 if self._is_whole else math.prod(shape[:axis])
        self._count = rows * self._in_row if math.prod(shape) else 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Box]:
        return map(self.__getitem__, range(self._count))

    def __getitem__(self, number: int) -> Box:
        """One box, by its place in C order."""
        if not 0 <= number < self._count:
            raise IndexError(number)
        shape, axis = self._shape, self._axis
        if self._is_whole:
            return (0,) * len(shape), shape
        row, place = divmod(number, self._in_row)
        leading: list[int] = []
        for extent in reversed(shape[:axis]):
            row, index = divmod(row, extent)
            leading.insert(0, index)
        start, inner = place * self._step, shape[axis + 1 :]
        extent = min(self._step, shape[axis] - start)
        return (*leading, start, *(0,) * len(inner)), (*(1,) * axis, extent, *inner)


def runs(things: Iterable[AnySized], run_bytes: int) -> Iterator[list[AnySized]]:
    """Things one after another, as many together as have at most `run_bytes`; what has more is alone."""
    run: list[AnySized] = []
    held = 0
    for thing in things:
        if run and held + thing.nbytes > run_bytes:
            yield run
            run, held = [], 0
        run.append(thing)
        held += thing.nbytes
    if run:
        yield run


def buffer_item_bytes(opened: Opened, array: int) -> int:
    """Bytes of one logical element of an array in the buffers that `read_parts` fills."""
    form = dtypes.of_stored(opened.tree.arrays[array])
    return int(form.host.itemsize) * math.prod(form.host_trailing)


def read_parts(
    opened: Opened, arrays: Sequence[int], parts: Sequence[Part], options: Options
) -> list[Values]:
    """Reads a group of parts; `arrays` says which array each index of a part is."""
    requests = [Request(arrays[part.index], [part.box]) for part in parts]
    read = opened.read_boxes(requests, options, lambda _job: None, ReadStatistics(), memory.allocate)
    return [found for (found,) in read]


def read_ahead(
    groups: Iterable[Group],
    read: Callable[[Group], Loaded],
    may_overlap: Callable[[Group, Group], bool] = lambda _, __: True,
) -> Generator[tuple[Group, Loaded], None, None]:
    """Each group with what `read` makes of it, while the next one is read in the background, if both may be
    in memory.

    At most two groups are in memory if the caller lets go of one before it asks for the next. It cannot go on
    in a forked child, as the thread that reads is in the parent only; it may be closed there.
    """
    remaining = iter(groups)
    group, following = next(remaining, None), next(remaining, None)
    if group is not None and following is None:
        yield group, read(group)  # nothing to overlap with: no thread
        return
    reader = Threads(1, "read ahead")
    owner = _forks.Owner()
    try:
        pending: concurrent.futures.Future[Loaded] | None = None
        while group is not None:
            loaded = (pending or reader.submit(read, group)).result()
            pending = None
            if following is not None and may_overlap(group, following):
                pending = reader.submit(read, following)
            yield group, loaded
            del loaded
            owner.require("what is read ahead", "read it anew here")
            group, following = following, next(remaining, None)
    finally:
        if owner.may_close:
            reader.shutdown()
