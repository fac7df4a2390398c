"""From stored tensors to the arrays of a framework: what is wanted, where it goes, and its making.

Invariants: everything that can be refused is refused before a byte of data is read; errors name the tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from waystation._collection import paused_collection
from waystation._errors import InvalidInput, WaystationError
from waystation._options import Options
from waystation.frameworks import casts, dtypes, registry
from waystation.frameworks.base import CastRule, Codec, StoredArray, Target
from waystation.layouts.opened import Destinations, Job, Opened, ReadStatistics, Request
from waystation.safetensors.arriving import Arriving
from waystation.safetensors.description import PACKED
from waystation.transfers import staging
from waystation.transfers.buffers import Incoming

Framework: TypeAlias = Literal["jax", "torch", "numpy"]
FRAMEWORKS = ("jax", "torch", "numpy")


def codec_of(framework: str) -> Codec:
    """The codec of a framework; imports the framework.

    Raises:
        InvalidInput: There is no such framework.
        Unsupported: It is not installed.
    """
    if framework not in FRAMEWORKS:
        raise InvalidInput(f"framework must be one of {', '.join(map(repr, FRAMEWORKS))}, not {framework!r}")
    return registry.codec_by_name(framework)


def as_held_by(stored: StoredArray, framework: str) -> StoredArray:
    """What a framework takes a tensor for: packed elements are bytes where it has no dtype for them."""
    if stored.dtype != PACKED or framework == "torch":
        return stored
    return dataclasses.replace(stored, dtype="uint8", storage_shape=stored.shape)


def held_by(stored: Sequence[StoredArray], framework: str) -> list[StoredArray]:
    """What a framework takes tensors for, see `as_held_by`; those that are one object stay one."""
    distinct = dict(zip(map(id, stored), stored, strict=True))
    held = {key: as_held_by(array, framework) for key, array in distinct.items()}
    return list(map(held.__getitem__, map(id, stored)))


def as_cast(stored: StoredArray, dtype: str) -> StoredArray:
    """A tensor as if it were of another dtype."""
    if dtype == stored.dtype:
        return stored
    logical = dtypes.of_name(dtype)
    return dataclasses.replace(
        stored,
        dtype=dtype,
        storage_dtype=logical.storage,
        storage_shape=logical.storage_shape(stored.shape),
    )


class OpenedTensors(Opened, Protocol):
    """What arrays are made of: the tensors of files, or what is composed of them.

    Attributes:
        labels: What each is called.
    """

    labels: list[str]

    def path_of(self, number: int) -> str:
        """The file of one of them."""
        ...

    def tensors_of(self, number: int) -> Sequence[int]:
        """The tensors of files that one is made of."""
        ...

    def start_to_devices(
        self,
        requests: Sequence[Request],
        destinations: Destinations,
        options: Options,
        on_job: Callable[[Job], None],
        statistics: ReadStatistics,
    ) -> Arriving:
        """Starts what `read_to_devices` does; the result tells of each tensor when it is there."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """Tensors that are to be loaded; of each what these lists have at its place.

    Attributes:
        numbers: Of the tensors.
        names: Of the arrays in the result.
        stored: The tensors as the framework takes them.
        dtypes: Of the arrays, logical.
        places: Where they go, as the codec has it.
    """

    numbers: Sequence[int]
    names: Sequence[str]
    stored: Sequence[StoredArray]
    dtypes: Sequence[str]
    places: Sequence[Any]


@paused_collection()
def incoming_of(opened: OpenedTensors, codec: Codec, wanted: Wanted, rule: CastRule) -> list[Incoming]:
    """The arrays with the places where they go, numbered as they are given."""
    with naming_tensors(opened, wanted.numbers):
        targets = codec.placed(wanted.stored, wanted.dtypes, wanted.places)
        _check_casts(wanted, targets, rule)
    leaves = range(len(targets))
    values = itertools.repeat(None)
    return list(map(Incoming, leaves, wanted.stored, wanted.numbers, values, targets))


@contextlib.contextmanager
def naming_tensors(opened: OpenedTensors, numbers: Sequence[int]) -> Iterator[None]:
    """Replaces a codec's index into its batch by the tensor and its file, in errors."""
    try:
        yield
    except WaystationError as error:
        raise naming_tensor(error, opened, numbers)


def naming_tensor(error: WaystationError, opened: OpenedTensors, numbers: Sequence[int]) -> WaystationError:
    """An error with the tensor and its file in place of a codec's index into its batch."""
    index = error.context.pop("index", None)
    if isinstance(index, int):
        error.where(tensor=opened.labels[numbers[index]], path=opened.path_of(numbers[index]))
    return error


@contextlib.contextmanager
def calling_arrays_tensors(opened: OpenedTensors | None = None) -> Iterator[None]:
    """Says `tensor` in errors of what the layers below call an array, and in which file it is, if told."""
    try:
        yield
    except WaystationError as error:
        name = error.context.pop("array", None)
        error.where(tensor=name)
        if opened is not None and name in opened.labels:
            error.where(path=opened.path_of(opened.labels.index(name)))
        raise


def _check_casts(wanted: Wanted, targets: Sequence[Target], rule: CastRule) -> None:
    for index, (stored, target) in enumerate(zip(wanted.stored, targets, strict=True)):
        if stored.dtype != target.dtype:
            try:
                casts.check(stored.dtype, target.dtype, rule)
            except WaystationError as error:
                raise error.where(index=index)


class Made:
    """The arrays of a load as they come to be; a `staging.Maker`.

    Attributes:
        arrays: By the number of the leaf; None until made.
    """

    def __init__(self, opened: OpenedTensors, count: int) -> None:
        self._opened = opened
        self.arrays: list[Any] = [None] * count

    @paused_collection()
    def make(self, codec: Codec, arrays: Sequence[Incoming], *, wait: bool) -> None:
        """Makes arrays of filled buffers; if told so, waits until they no longer need these."""
        with naming_tensors(self._opened, [incoming.array or 0 for incoming in arrays]):
            made = codec.assemble(
                [incoming.target for incoming in arrays], [incoming.buffers for incoming in arrays]
            )
            if wait:
                codec.wait(made)
        self.keep([incoming.leaf for incoming in arrays], made)

    def keep(self, numbers: Sequence[int], leaves: Sequence[Any]) -> None:
        """Takes arrays that are made already."""
        for number, array in zip(numbers, leaves, strict=True):
            self.arrays[number] = array

    def take(self, leaf: int) -> Any:
        """An array that was made, of which nothing is kept here."""
        array, self.arrays[leaf] = self.arrays[leaf], None
        return array

    def put(self, part: staging.Part) -> None:
        """Puts a part into its array, which is made once it has all parts."""
        number = part.incoming.array or 0
        with naming_tensors(self._opened, [number]):
            try:
                self.arrays[part.incoming.leaf] = part.whole.put(part)
            except WaystationError as error:
                raise error.where(tensor=self._opened.labels[number])
