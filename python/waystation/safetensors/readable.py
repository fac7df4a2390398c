"""Arrays that are read from safetensors files box by box: what `OpenFiles` and `Composed` have in common.

Every box that is wanted gets memory of its own. Invariants: all that is read in one call is read at the same
time; the arrays over the memory are made while the engine fills it, and handed out only once all of it is
there.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._collection import paused_collection
from waystation._distinct import distinct_objects
from waystation._options import Options
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray
from waystation.frameworks.storage import StorageMetadata
from waystation.grid import volume, whole
from waystation.layouts.native import memory
from waystation.layouts.opened import (
    Allocate,
    ArrayLeaf,
    Destinations,
    Job,
    Leaf,
    Over,
    ReadStatistics,
    Request,
    StoredTree,
)
from waystation.safetensors.arriving import Arriving
from waystation.safetensors.description import Described
from waystation.tree import flatten

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Boxes:
    """What is to be read.

    Attributes:
        requests: As they were asked for.
        forms: The dtype of each of them in host memory.
        counts: How many boxes each of them has.
        sizes: The bytes of each of their boxes.
    """

    requests: Sequence[Request]
    forms: list[np.dtype[Any]]
    counts: list[int]
    sizes: list[int]


class Readable(ABC):
    """Arrays by number, boxes of which can be read.

    Attributes:
        labels: What they are called.
    """

    labels: list[str]
    mapped = None  # `safetensors.mapped` maps them: how they are aligned depends on the framework

    @property
    def notices_absence(self) -> bool:
        """Whether a read fails where a file is missing: always."""
        return True

    @property
    @abstractmethod
    def directory(self) -> str:
        """Where the files are: that of the first."""

    @property
    @abstractmethod
    def numbered(self) -> Any:
        """The numbers of the arrays, as the state that these make up."""

    @abstractmethod
    def path_of(self, number: int) -> str:
        """The file of an array, the first if there are several."""

    @abstractmethod
    def array(self, number: int) -> StoredArray:
        """An array as arrays are described.

        Raises:
            Unsupported: No framework has its dtype.
        """

    def arrays(self, numbers: Sequence[int]) -> list[StoredArray]:
        """Some arrays as arrays are described, see `array`."""
        return [self.array(number) for number in numbers]

    @abstractmethod
    def tensors_of(self, number: int) -> Sequence[int]:
        """The tensors of files that an array is made of."""

    @cached_property
    def tree(self) -> StoredTree:
        """The arrays as a state."""
        numbers, structure = flatten(self.numbered)
        leaves: list[Leaf] = [ArrayLeaf(number) for number in numbers]
        return StoredTree(structure, leaves, Described(len(self.labels), self.array), self.labels)

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How an array is cut: for those who read it, not at all."""
        shape = self.array(number).shape
        return StorageMetadata(shape, shape)

    # ---- reading -------------------------------------------------------------------------------

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        allocate: Allocate = memory.allocate,
    ) -> list[list[NDArray[Any]]]:
        """Reads every requested box into memory of its own, which `allocate` gives.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        return self._read(requests, options, on_job, statistics, allocate, _arrays_over)

    def read_over(
        self,
        arrays: Sequence[int],
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        over: Over,
        requests: Sequence[Request] = (),
        allocate: Allocate = memory.allocate,
    ) -> tuple[Sequence[object], list[list[NDArray[Any]]]]:
        """See `ReadOver`.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        with paused_collection():
            kinds, which = distinct_objects(self.arrays(arrays))
            boxes = [[whole(kind.shape)] for kind in kinds]
            own = list(map(Request, arrays, map(boxes.__getitem__, which.tolist())))
        count = len(own)

        def over_all(slabs: Sequence[Any], offsets: Sequence[int], boxes: Boxes) -> Any:
            rest = Boxes(requests, boxes.forms[count:], boxes.counts[count:], boxes.sizes[count:])
            return over(slabs[:count], offsets[:count]), _arrays_over(slabs[count:], offsets[count:], rest)

        found: tuple[Sequence[object], list[list[NDArray[Any]]]] = self._read(
            [*own, *requests], options, on_job, statistics, allocate, over_all
        )
        return found

    def _read(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
        allocate: Allocate,
        over: Callable[[Sequence[Any], Sequence[int], Boxes], T],
    ) -> T:
        """What `over` makes of the memory of boxes, by their requests."""
        with contextlib.ExitStack() as reading:
            with paused_collection():
                boxes = self._boxes(requests)
                places, addresses = allocate(boxes.sizes)
                slabs = [slab for slab, _ in places]
                destinations = Destinations(addresses, slabs)
                arriving = self.start_boxes(boxes, destinations, options, on_job, statistics, announce=False)
                reading.enter_context(contextlib.closing(arriving))
                made = over(slabs, [offset for _, offset in places], boxes)
            arriving.finish()
        return made

    def read_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
    ) -> None:
        """Reads every requested box to given memory, that of devices above all; whatever used that before
        must have been waited for.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        boxes = self._boxes(requests)
        self.start_boxes(boxes, destinations, options, on_job, statistics, announce=False).finish()

    def start_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
    ) -> Arriving:
        """Starts what `read_to_devices` does; the result tells of each tensor when it is there."""
        boxes = self._boxes(requests)
        return self.start_boxes(boxes, destinations, options, on_job, statistics, announce=True)

    @abstractmethod
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
        """Starts to read boxes to where they go.

        Args:
            boxes: What is read.
            destinations: Where it goes.
            options: How.
            on_job: Told of every job.
            statistics: Where what was read is added.
            announce: Whether the result can tell of each tensor when it is there.

        Raises:
            Conflict: A file changed.
        """

    @paused_collection()
    def _boxes(self, requests: Sequence[Request]) -> Boxes:
        """What is known of the requested boxes."""
        stored = self.arrays([request.array for request in requests])
        own = [request.boxes for request in requests]
        # Models have many tensors of few shapes.
        kinds = list(zip(map(id, stored), map(id, own), strict=True))
        known: dict[tuple[int, int], tuple[np.dtype[Any], list[int]]] = {}
        for kind, (array, boxes) in dict(zip(kinds, zip(stored, own, strict=True), strict=True)).items():
            form = dtypes.of_stored(array).host
            known[kind] = form, [volume(box) * form.itemsize for box in boxes]
        found = list(map(known.__getitem__, kinds))
        sizes = [nbytes for _, own_sizes in found for nbytes in own_sizes]
        return Boxes(requests, [form for form, _ in found], list(map(len, own)), sizes)


def _arrays_over(
    slabs: Sequence[_native.Slab | None], offsets: Sequence[int], boxes: Boxes
) -> list[list[NDArray[Any]]]:
    """Arrays over the memory of boxes, by their requests; without a slab there are no elements."""
    shapes = [box[1] for request in boxes.requests for box in request.boxes]
    forms = itertools.chain.from_iterable(map(itertools.repeat, boxes.forms, boxes.counts))
    over: Callable[..., NDArray[Any]] = np.ndarray
    arrays = map(over, shapes, forms, slabs, offsets)
    return [list(itertools.islice(arrays, count)) for count in boxes.counts]
