"""The arrays of one load, from where they are stored to leaves.

Arrays that stay in the host memory that they are read to are *resident*: all of them are read in one engine
job, and made in one batch for each framework. Those that are wanted whole stand in columns (`Whole`), also
where they are cast, or go to memory of the caller. With a bound on memory arrays that are not resident are
*staged* (`transfers/staging.py`): read and made group by group. What the engine can bring to its devices
itself goes neither way (`transfers/devices.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from waystation import _native
from waystation._collection import paused_collection
from waystation._distinct import distinct_objects
from waystation._errors import WaystationError
from waystation._options import Options
from waystation.frameworks import casts
from waystation.frameworks.base import Codec, StoredArray, Target
from waystation.grid import contiguous_strides
from waystation.grid import whole as whole_box
from waystation.layouts.native import memory
from waystation.layouts.opened import Mapped, Opened, ReadStatistics, Request
from waystation.transfers import devices, in_place, staging
from waystation.transfers.buffers import Buffer, Incoming, Reading, aligned, by_kind, fill_buffers
from waystation.transfers.handle import Progress
from waystation.transfers.pieces import read_ahead

# Stored as arrays, but none: long texts, and in Orbax's layouts the numbers of Python.
NO_ARRAYS = ("bytes", "str", "python")

Batch = tuple[Codec, list[Incoming]]


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """Arrays that are wanted whole, in memory that the leaves keep.

    Models and optimizers have thousands of small arrays, of few shapes and dtypes. So they stand in columns:
    of each what these lists have at its place. Equal targets are one object.

    Attributes:
        codec: What makes them.
        leaves: The numbers of their leaves.
        arrays: Their own numbers.
        targets: Where they go.
        is_cast: Whether they are wanted in other dtypes than they are stored in, all of them; then they may
            be loaded into arrays of the caller, as their targets say.
        given: Memory of the caller that they are read to, all of them.
    """

    codec: Codec
    leaves: Sequence[int]
    arrays: Sequence[int]
    targets: Sequence[Target]
    is_cast: bool = False
    given: in_place.Given | None = None

    @property
    def is_over_memory(self) -> bool:
        """Whether they are made while their memory is filled."""
        make = self.codec.over_memory
        return make is not None and all(map(make.is_made_over_memory, distinct_objects(self.targets)[0]))

    def over(
        self, opened: Opened, slabs: Sequence[_native.Slab | None], offsets: Sequence[int]
    ) -> Sequence[Any]:
        """Their leaves over memory that is still written to, or what they are made of once it is not."""
        if self.codec.over_memory is not None and self.is_over_memory:
            return self.codec.over_memory.arrays_over(self.targets, slabs, offsets)
        forms = self.wanted_forms(opened) if self.is_cast else self.stored_forms(opened)
        return memory.arrays_over(forms, slabs, offsets)

    def stored_forms(self, opened: Opened) -> list[memory.Form]:
        """How host memory has the arrays as they are stored; equal forms are one object."""
        kinds, which = distinct_objects(list(map(opened.tree.arrays.__getitem__, self.arrays)))
        forms = list(map(memory.form_of, kinds))
        return list(map(forms.__getitem__, which.tolist()))

    def wanted_forms(self, opened: Opened) -> list[memory.Form]:
        """How host memory has them as they are wanted."""
        stored = list(map(opened.tree.arrays.__getitem__, self.arrays))
        kinds = list(zip(map(id, stored), [target.dtype for target in self.targets], strict=True))
        pairs = dict(zip(kinds, stored, strict=True))
        forms = {kind: memory.form_of_cast(array, kind[1]) for kind, array in pairs.items()}
        return list(map(forms.__getitem__, kinds))

    def finished(self, made: Sequence[Any]) -> Sequence[object]:
        """Their leaves, of what `over` has made."""
        if not self.is_over_memory:
            try:
                with paused_collection():
                    made = self.codec.assemble(self.targets, [[buffer] for buffer in made])
            except WaystationError as error:
                index = error.context.pop("index", None)
                raise error.where(leaf=None if index is None else self.leaves[index])
        return in_place.put(self.codec, self.targets, made) if self.is_cast else made


class Filling:
    """What is to be filled, and how.

    Args:
        opened: What is read.
        options: How; they bound the memory.
        progress: Whom to tell about jobs, and who may cancel.
        mappings: What is mapped instead of being read, if anything is.
        batches: The arrays, by the codec that makes them.
        in_groups: Whether resident arrays, too, are read in groups, by the caller.
        whole: Arrays that are in none of the batches; only where `can_be_whole` says so of them.
        statistics: Where what is read is counted; None counts anew.

    Attributes:
        resident: The arrays that are made of the memory that they are read to, with their codecs. Their
            buffers may be filled by somebody else before `finish`.
        staged: The others, with theirs.
        on_devices: What the engine brings to devices itself, if memory is bounded. Without a bound that is
            found among the resident arrays in the end, since somebody else may fill their buffers.
        reading: How arrays are read.
        group_bytes: What a group of arrays may take.
    """

    def __init__(
        self,
        opened: Opened,
        options: Options,
        progress: Progress,
        mappings: Mapped | None,
        batches: Sequence[Batch],
        *,
        in_groups: bool = False,
        whole: Sequence[Whole] = (),
        statistics: ReadStatistics | None = None,
    ) -> None:
        self._whole = whole
        self.resident: list[Batch] = list(batches)
        self.staged: list[tuple[Codec, Incoming]] = []
        self.on_devices: list[Batch] = []
        if statistics is None:
            statistics = ReadStatistics()
        self.reading: Reading = Reading(
            opened, options, progress, statistics, mappings, staging.CAST_GROUP_BYTES, is_bounded=False
        )
        self.group_bytes: int = 0
        if options.memory.read_concurrent_bytes is not None:
            self._bound(options.memory.read_concurrent_bytes, in_groups=in_groups)

    def _bound(self, limit_bytes: int, *, in_groups: bool) -> None:
        """Stays within the bound that the options set."""
        self.resident, others = _divide(self.resident, _stay_on_host)
        self.on_devices, others = _divide(others, self._go_to_devices)
        self.staged = [(codec, incoming) for codec, batch in others for incoming in batch]
        are_cast = any(_are_cast(batch) for _, batch in self.resident)
        shares = staging.Shares.of(limit_bytes, are_staged=in_groups or bool(self.staged), are_cast=are_cast)
        self.group_bytes = shares.group_bytes
        self.reading = dataclasses.replace(
            self.reading,
            options=staging.bound_engine(self.reading.options, shares.engine_bytes),
            cast_bytes=shares.cast_bytes,
            is_bounded=True,
        )

    def _go_to_devices(self, codec: Codec, batch: Sequence[Incoming]) -> list[bool]:
        opened = self.reading.opened
        return [
            not incoming.buffers and _is_array(incoming) and devices.can_take(opened, codec, incoming)
            for incoming in batch
        ]

    def _still_to_devices(self) -> tuple[list[Batch], list[Batch]]:
        """What of the resident arrays the engine brings to devices after all, and the others."""
        if self.reading.is_bounded:
            return [], self.resident
        return _divide(self.resident, self._go_to_devices)

    def finish(self, maker: staging.Maker) -> None:
        """Reads what has no buffers yet, and has all leaves made."""
        found, resident = self._still_to_devices()
        taken = in_place.Taken()
        for whole in self._whole:
            if whole.given is not None:
                in_place.fill_given(self.reading, whole.arrays, whole.given, taken)
                maker.keep(whole.leaves, whole.given.leaves)
        in_place.fill(self.reading, resident, taken)
        as_whole = _as_whole(self.reading, *resident[0]) if len(resident) == 1 else None
        if as_whole is not None:
            resident = []
        wholes = [whole for whole in self._whole if whole.given is None and not whole.is_cast]
        wholes = wholes if as_whole is None else [as_whole]
        fill_buffers(
            self.reading,
            [incoming for _, batch in resident for incoming in batch if not incoming.buffers],
            read=functools.partial(_read_with, self.reading, wholes, maker) if wholes else None,
        )
        for whole in self._whole:
            if whole.is_cast:
                maker.keep(whole.leaves, _cast(self.reading, whole))
        for codec, batch in resident:
            maker.make(codec, batch, wait=False)
        for codec, batch in self.on_devices + found:
            for arrays, leaves in devices.load(self.reading, codec, batch):
                numbers = [incoming.leaf for incoming in arrays]
                targets = [incoming.target for incoming in arrays]
                maker.keep(numbers, in_place.put(codec, targets, leaves))
        if self.staged:
            # Read, not mapped: the pages of a mapping would stay until all of it is let go of.
            reading = dataclasses.replace(self.reading, mappings=None)
            staging.load_staged(reading, self.staged, self.group_bytes, maker)


def can_be_whole(opened: Opened, codec: Codec, stored: StoredArray, target: Target) -> bool:
    """Whether an array can be one of `Whole`: of those that are cast if its dtype differs."""
    is_cast = stored.dtype != target.dtype
    return (
        opened.read_over is not None
        and stored.framework not in NO_ARRAYS
        and stored.shape == target.shape
        and target.boxes == [whole_box(target.shape)]
        and (target.into is None or is_cast)
        and (not is_cast or memory.form_of(stored).nbytes <= staging.CAST_GROUP_BYTES)
        and (codec.devices is None or not codec.devices.goes_to_devices(target, stored.dtype))
    )


def _as_whole(reading: Reading, codec: Codec, batch: Sequence[Incoming]) -> Whole | None:
    """A batch as columns, if none of it has been read yet; None where not all of it can be."""
    if reading.mappings is not None or any(incoming.buffers for incoming in batch) or not batch:
        return None

    def can_be(incoming: Incoming) -> bool:
        target = incoming.target
        can = can_be_whole(reading.opened, codec, incoming.stored, target)
        return can and incoming.is_plain and Whole(codec, [], [], [target]).is_over_memory

    if not all(by_kind(can_be, batch)):
        return None
    arrays = [incoming.array or 0 for incoming in batch]
    return Whole(
        codec, [incoming.leaf for incoming in batch], arrays, [incoming.target for incoming in batch]
    )


def _read_with(
    reading: Reading, wholes: Sequence[Whole], maker: staging.Maker, requests: Sequence[Request]
) -> list[list[Buffer]]:
    """Reads boxes, and whole arrays in the same job: no block is read twice. Makes the leaves of these.

    Shape, dtype and place say all that some frameworks want to know of an array, so that thousands of small
    ones are made in the time that their bytes take. Nobody gets them before every byte is there.
    """
    read = reading.opened.read_over
    assert read is not None, "it was asked before"
    ends = np.cumsum([len(whole.arrays) for whole in wholes]).tolist()
    spans = list(zip(wholes, [0, *ends], ends, strict=False))

    def over(slabs: Sequence[_native.Slab | None], offsets: Sequence[int]) -> list[Sequence[Any]]:
        return [
            whole.over(reading.opened, slabs[begin:end], offsets[begin:end]) for whole, begin, end in spans
        ]

    reading.check_cancelled()
    arrays = [number for whole in wholes for number in whole.arrays]
    made, boxes = read(arrays, reading.options, reading.progress.add, reading.statistics, over, requests)
    for whole, leaves in zip(wholes, cast("list[Sequence[Any]]", made), strict=True):
        maker.keep(whole.leaves, whole.finished(leaves))
    return boxes


# ---- casts of many arrays at once --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Arrays that are read and cast together: those of a kind one after another.

    Attributes:
        places: Their places among all.
        nbytes: What they take as they are stored.
    """

    places: NDArray[np.int64]
    nbytes: int


def _cast(reading: Reading, whole: Whole) -> Sequence[object]:
    """Reads arrays in groups, casts those of a kind that lie beside each other at once, and makes leaves."""
    with paused_collection():
        stored_forms = whole.stored_forms(reading.opened)
        wanted_forms = whole.wanted_forms(reading.opened)
        groups = _groups(stored_forms, wanted_forms, reading.cast_bytes)
        order = np.concatenate([group.places for group in groups])
        sizes = np.array([form.nbytes for form in wanted_forms], np.int64)
        slabs, offsets, _ = memory.place(sizes[order])
        back = np.argsort(order).tolist()
        slabs, offsets = list(map(slabs.__getitem__, back)), list(map(offsets.__getitem__, back))
        buffers = _Buffers(wanted_forms, slabs, offsets)

    def read(group: _Group) -> _Buffers:
        over = reading.opened.read_over
        assert over is not None, "it was asked before"
        reading.check_cancelled()
        numbers = [whole.arrays[place] for place in group.places.tolist()]
        (found, _) = over(
            numbers,
            reading.options,
            reading.progress.add,
            reading.statistics,
            lambda slabs, offsets: [slabs, offsets],
        )
        own_slabs, own_offsets = cast("list[Any]", found)
        forms = [stored_forms[place] for place in group.places.tolist()]
        return _Buffers(forms, own_slabs, own_offsets)

    with contextlib.closing(read_ahead(groups, read)) as pairs:
        for group, values in pairs:
            _cast_group(reading, whole, buffers.at(group.places), values, group)
            del values  # or it would live until the next group is here, and the one after is being read
    return whole.finished(whole.over(reading.opened, slabs, offsets))


def _groups(stored: Sequence[memory.Form], wanted: Sequence[memory.Form], most_bytes: int) -> list[_Group]:
    """Groups of at most so many bytes, in order."""
    ends = np.cumsum([aligned(form.nbytes) for form in stored])
    kinds = np.array(list(map(hash, zip(map(id, stored), map(id, wanted), strict=True))), np.int64)
    groups: list[_Group] = []
    start = held = 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, held + most_bytes, side="right")))
        own = start + np.argsort(kinds[start:stop], kind="stable")
        groups.append(_Group(own, int(ends[stop - 1]) - held))
        start, held = stop, int(ends[stop - 1])
    return groups


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffers:
    """Parts of slabs, and what is in them."""

    forms: Sequence[memory.Form]
    slabs: Sequence[_native.Slab | None]
    offsets: Sequence[int]

    def at(self, places: NDArray[np.int64]) -> _Buffers:
        """Some of them."""
        own = places.tolist()
        return _Buffers(
            [self.forms[place] for place in own],
            [self.slabs[place] for place in own],
            [self.offsets[place] for place in own],
        )

    def view(self, begin: int, count: int) -> Buffer:
        """Some that follow one another as one array; of equal form, in one slab."""
        form = self.forms[begin]
        step = self.offsets[begin + 1] - self.offsets[begin] if count > 1 else form.nbytes
        strides = (step, *contiguous_strides(form.shape, form.dtype.itemsize))
        return np.ndarray((count, *form.shape), form.dtype, self.slabs[begin], self.offsets[begin], strides)


def _cast_group(reading: Reading, whole: Whole, buffers: _Buffers, values: _Buffers, group: _Group) -> None:
    rule = casts.rule_of_loads(reading.options)
    columns = (buffers.forms, buffers.slabs, values.forms, values.slabs)
    ids = np.array([list(map(id, column)) for column in columns], np.uint64)
    begins = np.flatnonzero(np.any(ids[:, 1:] != ids[:, :-1], axis=0)) + 1
    try:
        for begin, end in itertools.pairwise([0, *begins.tolist(), len(group.places)]):
            if buffers.forms[begin].nbytes:
                casts.copy(buffers.view(begin, end - begin), values.view(begin, end - begin), rule)
    except WaystationError:
        for begin in np.argsort(group.places).tolist():  # for the first array with what is refused
            _cast_one(reading, whole, int(group.places[begin]), buffers.view(begin, 1), values.view(begin, 1))
        raise


def _cast_one(reading: Reading, whole: Whole, place: int, buffer: Buffer, values: Buffer) -> None:
    try:
        casts.copy(buffer, values, casts.rule_of_loads(reading.options))
    except WaystationError as error:
        raise error.where(array=reading.opened.tree.labels[whole.arrays[place]]) from None


def _stay_on_host(codec: Codec, batch: Sequence[Incoming]) -> list[bool]:
    """Which arrays keep living in their buffers."""
    return by_kind(lambda own: _is_array(own) and codec.stays_on_host(own.target), batch)


def _is_array(incoming: Incoming) -> bool:
    return incoming.stored.framework not in NO_ARRAYS


def _divide(
    batches: Sequence[Batch], choose: Callable[[Codec, Sequence[Incoming]], Sequence[bool]]
) -> tuple[list[Batch], list[Batch]]:
    """Two parts of every batch: the arrays that are chosen, and the others."""
    parts: tuple[list[Batch], list[Batch]] = ([], [])
    for codec, batch in batches:
        chosen = choose(codec, batch)
        if all(chosen):  # nearly always, and there may be thousands
            parts[0].append((codec, batch))
            continue
        parts[0].append((codec, list(itertools.compress(batch, chosen))))
        parts[1].append((codec, list(itertools.compress(batch, map(operator.not_, chosen)))))
    return parts


def _are_cast(batch: Sequence[Incoming]) -> bool:
    """Whether some arrays are not wanted as they are stored, or in other extents."""
    return not all(by_kind(operator.attrgetter("is_plain"), batch))
