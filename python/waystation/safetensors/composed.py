"""Arrays that are put together from boxes of tensors, read as if files held them so.

What a process gets of a model need not be what a file holds: a block of a tensor, or the blocks of several
of them one after another. `Composed` shows such arrays to everything that reads, as `OpenFiles` shows
tensors, so that they are read straight to where they belong: nothing is joined or cut in memory. Invariants:
the parts of an array are of one dtype, and cover it without overlap; all that is read in one call is read in
one job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.frameworks.storage import StorageMetadata
from waystation.grid import Box, contiguous_strides, intersect, relative_to, volume
from waystation.layouts.native import memory
from waystation.layouts.native.destinations import Destinations
from waystation.layouts.native.read import Allocate, Request, as_array
from waystation.layouts.native.read_job import ReadStatistics
from waystation.layouts.native.tree_file import ArrayLeaf, Leaf, TreeFile
from waystation.safetensors.arriving import Arriving
from waystation.safetensors.open_files import OpenFiles, PlacedBox
from waystation.tree import flatten


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and where it begins in the array that it is part of."""

    tensor: int
    box: Box
    offset: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Composition:
    """An array, made of parts.

    Attributes:
        label: What it is called in errors.
        shape: Of the array.
        parts: At least one.
    """

    label: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Composed:
    """Compositions of the tensors of some files, numbered in their order.

    Args:
        opened: The files.
        compositions: What is put together of them.
        among: The number of this process, and of how many that read the same, see `read_job.start`.

    Attributes:
        labels: What they are called.
    """

    def __init__(
        self,
        opened: OpenFiles,
        compositions: Sequence[Composition],
        among: tuple[int, int] | None = None,
    ) -> None:
        self._opened = opened
        self._among = among
        self._compositions = compositions
        self.labels = [composition.label for composition in compositions]

    @property
    def directory(self) -> str:
        """Where the files are: that of the first."""
        return self._opened.directory

    @cached_property
    def tree(self) -> TreeFile:
        """The arrays as a state: one list."""
        numbers, structure = flatten(list(range(len(self._compositions))))
        leaves: list[Leaf] = [ArrayLeaf(number) for number in numbers]
        return TreeFile(structure, leaves, [self.array(number) for number in numbers], self.labels)

    def path_of(self, number: int) -> str:
        """The file of an array, the first if there are several."""
        return self._opened.path_of(self._compositions[number].parts[0].tensor)

    def array(self, number: int) -> StoredArray:
        """An array as arrays are described."""
        composition = self._compositions[number]
        stored = self._opened.array(composition.parts[0].tensor)
        trailing = stored.storage_shape[len(stored.shape) :]
        return dataclasses.replace(
            stored, shape=composition.shape, storage_shape=composition.shape + trailing
        )

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How an array is cut: for those who read it, not at all."""
        shape = self._compositions[number].shape
        return StorageMetadata(shape, shape)

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        allocate: Allocate = memory.allocate,
    ) -> list[list[NDArray[Any]]]:
        """Reads every requested box into memory of its own, which `allocate` gives.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        forms = [dtypes.of_stored(self.array(request.array)).host for request in requests]
        places, addresses = allocate(
            [
                volume(box) * form.itemsize
                for request, form in zip(requests, forms, strict=True)
                for box in request.boxes
            ]
        )
        destinations = Destinations(addresses, [place[0] for place in places])
        self.read_to_devices(requests, destinations, options, on_job, statistics)
        remaining = iter(places)
        return [
            [as_array(next(remaining), box[1], form) for box in request.boxes]
            for request, form in zip(requests, forms, strict=True)
        ]

    def read_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
    ) -> None:
        """Reads every requested box to given memory, that of devices above all; whatever used that before
        must have been waited for.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        self.start_to_devices(requests, destinations, options, on_job, statistics, announce=False).finish()

    def start_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        *,
        announce: bool = True,
    ) -> Arriving:
        """Starts what `read_to_devices` does; the result tells of each tensor when it is there."""
        addresses = iter(destinations.addresses.tolist())
        placed: list[PlacedBox] = []
        for request in requests:
            item_bytes = dtypes.of_stored(self.array(request.array)).host.itemsize
            for box in request.boxes:
                placed += self._placed(request.array, box, next(addresses), item_bytes)
        return self._opened.start_placed(
            placed, destinations, options, on_job, statistics, announce=announce, among=self._among
        )

    def tensors_of(self, number: int) -> Sequence[int]:
        """The tensors that an array is made of."""
        return [part.tensor for part in self._compositions[number].parts]

    def _placed(self, number: int, box: Box, address: int, item_bytes: int) -> list[PlacedBox]:
        """The boxes of tensors that make up a box of an array, which begins at an address."""
        strides = contiguous_strides(box[1], item_bytes)
        found: list[PlacedBox] = []
        for part in self._compositions[number].parts:
            common = intersect(box, (part.offset, part.box[1]))
            if common is None:
                continue
            inside = relative_to(common, part.offset)[0]
            begin = tuple(at + first for at, first in zip(inside, part.box[0], strict=True))
            skipped = relative_to(common, box[0])[0]
            at = address + sum(step * count for step, count in zip(strides, skipped, strict=True))
            found.append((part.tensor, (begin, common[1]), at, strides))
        return found
