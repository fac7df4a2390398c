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
from typing import NamedTuple

from waystation._options import Options
from waystation.frameworks.base import StoredArray
from waystation.grid import Box, contiguous_strides, intersect, relative_to
from waystation.layouts.opened import Destinations, Job, ReadStatistics
from waystation.safetensors.arriving import Arriving
from waystation.safetensors.open_files import OpenFiles, PlacedBox
from waystation.safetensors.readable import Boxes, Readable


class Part(NamedTuple):
    """A box of a tensor, and where it begins in the array that it is part of."""

    tensor: int
    box: Box
    offset: tuple[int, ...]


class Composition(NamedTuple):
    """An array, made of parts.

    Attributes:
        label: What it is called in errors.
        shape: Of the array.
        parts: At least one.
    """

    label: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Composed(Readable):
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
        self.labels: list[str] = [composition.label for composition in compositions]
        self._arrays: list[StoredArray] = []
        self._is_tensor: list[bool] = []  # whether an array is a tensor, whole
        self._describe()

    @property
    def notices_absence(self) -> bool:
        """Whether a read fails where a file is missing: always."""
        return True

    @property
    def directory(self) -> str:
        """Where the files are: that of the first."""
        return self._opened.directory

    @property
    def numbered(self) -> list[int]:
        """The arrays as a state: one list."""
        return list(range(len(self._compositions)))

    def path_of(self, number: int) -> str:
        """The file of an array, the first if there are several."""
        return self._opened.path_of(self._compositions[number].parts[0].tensor)

    def array(self, number: int) -> StoredArray:
        """An array as arrays are described; those of equal arrays are one object."""
        return self._arrays[number]

    def arrays(self, numbers: Sequence[int]) -> list[StoredArray]:
        """Some arrays as arrays are described, see `array`."""
        return list(map(self._arrays.__getitem__, numbers))

    def _describe(self) -> None:
        """Describes all arrays."""
        tensors = self._opened.arrays([composition.parts[0].tensor for composition in self._compositions])
        known: dict[tuple[int, tuple[int, ...]], StoredArray] = {}  # models have few shapes
        for stored, composition in zip(tensors, self._compositions, strict=True):
            kind = id(stored), composition.shape
            array = known.get(kind)
            if array is None:
                trailing = stored.storage_shape[len(stored.shape) :]
                array = known[kind] = dataclasses.replace(
                    stored, shape=composition.shape, storage_shape=composition.shape + trailing
                )
            self._arrays.append(array)
            self._is_tensor.append(len(composition.parts) == 1 and composition.shape == stored.shape)

    def start_boxes(
        self,
        boxes: Boxes,
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        *,
        announce: bool,
    ) -> Arriving:
        """Starts to read boxes to where they go, see `Readable.start_boxes`."""
        addresses = iter(destinations.addresses.tolist())
        tensors: list[tuple[int, int]] = []
        placed: list[PlacedBox] = []
        for request, form in zip(boxes.requests, boxes.forms, strict=True):
            number, composition = request.array, self._compositions[request.array]
            for box, address in zip(request.boxes, addresses, strict=False):
                if self._is_tensor[number] and box[1] == composition.shape:
                    tensors.append((composition.parts[0].tensor, address))
                else:
                    placed += self._placed(number, box, address, form.itemsize)
        return self._opened.start_placed(
            *(tensors, placed, destinations, options, on_job, statistics),
            announce=announce,
            among=self._among,
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
