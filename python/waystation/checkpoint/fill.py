"""Reads what was decided and makes the leaves.

Leaves are sorted by the codec that makes them, each codec says where its arrays go, and the memory for them
is filled and the leaves are made (`transfers/filling.py`), where other processes have not sent it
(`checkpoint/broadcast.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from waystation._collection import paused_collection
from waystation._distinct import distinct, distinct_objects
from waystation._errors import InvalidInput, WaystationError
from waystation._options import ArrayLoadingOptions, Options
from waystation.checkpoint import wanted
from waystation.checkpoint.wanted import Decided, convert, is_scalar, scalar_type
from waystation.frameworks import casts, registry
from waystation.frameworks.base import CastRule, Codec, StoredArray, Target
from waystation.layouts.opened import ArrayLeaf, Opened, Scalar
from waystation.transfers import filling, fit, in_place, staging
from waystation.transfers.buffers import Buffer, Incoming, Reading
from waystation.transfers.handle import Progress
from waystation.transfers.statistics import LoadStatistics


class Filling:
    """The leaves of one load, from their description to the finished leaf.

    Args:
        opened: The state.
        decided: What is wanted of it.
        options: How it is loaded.
        progress: Is told of the bytes that have been read.
        path: The checkpoint, for the statistics.
        checkpointable: The name of the state in it; None if it has none.
        are_shared: Whether other processes may fill buffers of `resident`.
        begun_s: When the load was called, by the monotonic clock; None: now.

    Attributes:
        resident: The arrays that are made of the memory that they are read to, with their codecs. Their
            buffers may be filled by somebody else before `finish`.
        reading: How arrays are read.
        statistics: Of what has been read, once `finish` has returned; they are told by the caller, when all
            processes have their parts.
    """

    resident: list[filling.Batch]
    reading: Reading
    statistics: LoadStatistics

    def __init__(
        self,
        opened: Opened,
        decided: Decided,
        options: Options,
        progress: Progress,
        path: str,
        checkpointable: str | None = None,
        *,
        are_shared: bool = False,
        begun_s: float | None = None,
    ) -> None:
        self._place = path, checkpointable
        self._begun_s = time.monotonic() if begun_s is None else begun_s
        loading = options.array.loading
        wanted.check_shapes(opened.tree, decided, extents_may_differ=loading.enable_padding_and_truncation)
        self._leaves = _Leaves(decided)
        batches = _sort(opened, decided, loading, self._leaves)
        mappings = None
        if loading.mmap and not loading.verify and opened.mapped is not None:
            mappings = opened.mapped()
        may_be_whole = mappings is None and not are_shared and options.memory.read_concurrent_bytes is None
        arrays: list[filling.Batch] = []
        whole: list[filling.Whole] = []
        for batch in batches:
            rest, targets = _targets_of(opened, batch, decided, options, whole if may_be_whole else None)
            arrays.append((batch.codec, rest.incoming(targets)))
        if loading.in_place and decided.abstracts is not None:
            _refuse_crossing(decided, arrays, whole)
        self._filling = filling.Filling(opened, options, progress, mappings, arrays, whole=whole)
        self.resident, self.reading = self._filling.resident, self._filling.reading

    def finish(self, received_bytes: int) -> list[Any]:
        """Reads what has no buffers yet, and makes the leaves, in order.

        Args:
            received_bytes: What other processes have sent, for the statistics.
        """
        try:
            self._filling.finish(self._leaves)
        except WaystationError as error:
            leaf = error.context.pop("leaf", None)
            if isinstance(leaf, int):
                error.where(array=self._leaves.name_for(error, leaf))
            if self.reading.options.array.loading.in_place:
                error.add_note("arrays that were to be loaded in place may hold a part of what was loaded")
            raise
        self._leaves.scalars_from_arrays()
        self.statistics = self._statistics(received_bytes)
        return self._leaves.made

    def _statistics(self, received_bytes: int) -> LoadStatistics:
        read = self.reading.statistics
        path, checkpointable = self._place
        return LoadStatistics(
            path,
            read.bytes_needed,
            read.bytes_read,
            time.monotonic() - self._begun_s,
            received_bytes,
            read.first_touch_s,
            checkpointable,
            read.cached_bytes,
            read.repeated_requests,
        )


# ---- deciding ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Batch:
    """The array leaves that one codec makes; of each what the lists have at its place."""

    codec: Codec
    numbers: list[int] = field(default_factory=list)
    stored: list[StoredArray] = field(default_factory=list)
    arrays: list[int] = field(default_factory=list)  # of a stored scalar, in `values`, nothing
    values: dict[int, Buffer] = field(default_factory=dict)  # by place

    def only(self, places: Sequence[int]) -> _Batch:
        """The leaves at some places."""
        return _Batch(
            self.codec,
            [self.numbers[place] for place in places],
            [self.stored[place] for place in places],
            [self.arrays[place] for place in places],
            {new: self.values[place] for new, place in enumerate(places) if place in self.values},
        )

    def incoming(self, targets: Sequence[Target]) -> list[Incoming]:
        """The leaves with the places where they go."""
        columns = zip(self.numbers, self.stored, self.arrays, targets, strict=True)
        values = self.values
        return [
            Incoming(number, stored, None if place in values else array, values.get(place), target)
            for place, (number, stored, array, target) in enumerate(columns)
        ]


@paused_collection()
def _sort(opened: Opened, decided: Decided, loading: ArrayLoadingOptions, leaves: _Leaves) -> list[_Batch]:
    """Converts scalars at once and sorts array leaves by the codec that makes them."""
    if decided.abstracts is None:
        return _sort_as_saved(opened, decided, loading, leaves)
    batches: dict[str, _Batch] = {}
    known: dict[type, _Batch] = {}
    arrays = opened.tree.arrays
    for number, (leaf, abstract) in enumerate(zip(decided.stored, decided.abstracts, strict=True)):
        is_array = type(leaf) is ArrayLeaf
        if leaf is wanted.PLACEHOLDER:
            leaves.made[number] = decided.kept.get(number, leaf)
            continue
        if not is_array and is_scalar(abstract):
            leaves.made[number] = _converted(leaf, abstract, decided, number)
            continue
        batch = known.get(type(abstract))
        if batch is None:
            codec = _codec_for(abstract)
            batch = known[type(abstract)] = batches.setdefault(codec.name, _Batch(codec))
        if not is_array:
            value = batch.values[len(batch.numbers)] = _as_array(leaf, decided, number)
        batch.numbers.append(number)
        batch.stored.append(arrays[leaf.array] if is_array else registry.stored_scalar(value))
        batch.arrays.append(leaf.array if is_array else -1)
    return list(batches.values())


def _sort_as_saved(
    opened: Opened, decided: Decided, loading: ArrayLoadingOptions, leaves: _Leaves
) -> list[_Batch]:
    """Takes scalars as they are and sorts array leaves by the codec that has saved them."""
    leaves.made[:] = decided.stored
    numbers = [number for number, leaf in enumerate(decided.stored) if type(leaf) is ArrayLeaf]
    arrays = [decided.stored[number].array for number in numbers]
    stored = list(map(opened.tree.arrays.__getitem__, arrays))
    frameworks = [array.framework for array in stored]
    batches: dict[str, _Batch] = {}
    for framework in dict.fromkeys(frameworks):
        name = "numpy" if loading.restore_on_host else framework
        codec = registry.available_codec(name)
        batch = batches.setdefault(codec.name, _Batch(codec))
        own = [own == framework for own in frameworks]
        batch.numbers += itertools.compress(numbers, own)
        batch.stored += itertools.compress(stored, own)
        batch.arrays += itertools.compress(arrays, own)
    return list(batches.values())


def _as_array(value: Scalar, decided: Decided, number: int) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject:
        error = InvalidInput("the stored int has more than 64 bits, so no array can hold it; ask for int")
        raise error.where(array=decided.name_for(error, number))
    return array


def _codec_for(abstract: Any) -> Codec:
    codec = None if is_scalar(abstract) else registry.codec_for(abstract)
    return registry.codec_by_name("numpy") if codec is None else codec


@paused_collection()
def _targets_of(
    opened: Opened, batch: _Batch, decided: Decided, options: Options, whole: list[filling.Whole] | None
) -> tuple[_Batch, list[Target]]:
    """Where the arrays of a batch go. Those that are loaded whole go to `whole`, if that may be; the others
    are returned."""
    loading, own = options.array.loading, batch.codec.in_place
    with _naming_leaves(decided, batch.numbers):
        targets = _targets(batch, decided, loading)
    if loading.in_place and decided.abstracts is not None and own is not None:
        if whole is not None:
            batch, targets = _take_given(opened, batch, targets, decided, whole)
        with _naming_leaves(decided, batch.numbers):
            targets = own.loaded_into([_abstract(decided, number) for number in batch.numbers], targets)
    with _naming_leaves(decided, batch.numbers):
        rule = casts.rule_of_loads(options)
        names = zip([array.dtype for array in batch.stored], [own.dtype for own in targets], strict=True)
        checked: set[tuple[str, str]] = set()
        for index, (stored, asked) in enumerate(names):
            if stored != asked and (stored, asked) not in checked:
                _check_cast(stored, asked, rule, index)
                checked.add((stored, asked))
    return (batch, targets) if whole is None else _divide(opened, batch, targets, whole)


def _refuse_crossing(
    decided: Decided, arrays: Sequence[filling.Batch], whole: Sequence[filling.Whole]
) -> None:
    """Raises InvalidInput if two arrays that are loaded into share memory, and each has some of its own."""
    spans = [
        span
        for each in whole
        for span in in_place.spans_of(each.codec, each.leaves, each.targets, each.given)
    ]
    for codec, batch in arrays:
        leaves, targets = [incoming.leaf for incoming in batch], [incoming.target for incoming in batch]
        spans += in_place.spans_of(codec, leaves, targets, None)
    crossing = in_place.first_crossing(spans)
    if crossing is None:
        return
    one, other = crossing
    error = InvalidInput(
        f"an array shares a part of its memory with the one at {decided.key_path(one)}, and the two cannot "
        "both be loaded into; give a copy of it"
    )
    raise error.where(array=decided.key_path(other))


def _take_given(
    opened: Opened, batch: _Batch, targets: list[Target], decided: Decided, whole: list[filling.Whole]
) -> tuple[_Batch, list[Target]]:
    """Adds the arrays that are read to memory of the caller to `whole`; returns the others."""
    manners = _manners(opened, batch, targets)
    rows = zip(batch.numbers, manners, strict=True)
    asked = [None if manner is None else _abstract(decided, number) for number, manner in rows]
    found = in_place.given(batch.codec, asked, batch.stored, targets)
    if found is None:
        return batch, targets
    places, given = found
    part = batch.only(places)
    own = [targets[place] for place in places]
    whole.append(filling.Whole(part.codec, part.numbers, part.arrays, own, given=given))
    return _without(batch, targets, places)


def _divide(
    opened: Opened, batch: _Batch, targets: list[Target], whole: list[filling.Whole]
) -> tuple[_Batch, list[Target]]:
    """Adds the arrays that are loaded whole to `whole`; returns the others."""
    manners = _manners(opened, batch, targets)
    found = set(manners)
    for is_cast in (is_cast for is_cast in (False, True) if is_cast in found):
        own = [place for place, manner in enumerate(manners) if manner is is_cast]
        part = batch if len(own) == len(manners) else batch.only(own)
        of_part = [targets[place] for place in own]
        whole.append(filling.Whole(part.codec, part.numbers, part.arrays, of_part, is_cast))
    if found == {None}:
        return batch, targets
    return _without(batch, targets, [place for place, manner in enumerate(manners) if manner is not None])


def _manners(opened: Opened, batch: _Batch, targets: Sequence[Target]) -> list[bool | None]:
    """Which arrays can be loaded whole, and with a cast; None for others. That is asked once of those that
    share target and description."""
    descriptions, described = distinct_objects(batch.stored)
    wanted, asked = distinct_objects(targets)
    pairs = described * len(wanted) + asked
    kinds = distinct(pairs)
    known: list[bool | None] = []
    for pair in kinds.tolist():
        stored, target = descriptions[pair // len(wanted)], wanted[pair % len(wanted)]
        can = filling.can_be_whole(opened, batch.codec, stored, target)
        known.append(stored.dtype != target.dtype if can else None)
    manners = list(map(known.__getitem__, np.searchsorted(kinds, pairs).tolist()))
    for place in batch.values:
        manners[place] = None
    return manners


def _without(batch: _Batch, targets: list[Target], places: Sequence[int]) -> tuple[_Batch, list[Target]]:
    """The leaves of a batch that are not at some places."""
    gone = set(places)
    rest = [place for place in range(len(targets)) if place not in gone]
    return batch.only(rest), [targets[place] for place in rest]


def _targets(batch: _Batch, decided: Decided, loading: ArrayLoadingOptions) -> list[Target]:
    if decided.abstracts is not None:
        abstracts = [_abstract(decided, number) for number in batch.numbers]
        extents = decided.extents
        stored = [
            fit.reshaped(array, extents[number]) if number in extents else array
            for number, array in zip(batch.numbers, batch.stored, strict=True)
        ]
        return batch.codec.targets(abstracts, stored)
    choose, sharded = loading.sharding_for, batch.codec.sharded
    if choose is not None and sharded is not None:
        return batch.codec.targets(_sharded(batch, decided, choose, sharded), batch.stored)
    kinds, which = distinct_objects(batch.stored)
    try:
        of_kinds = batch.codec.default_targets(kinds)
    except WaystationError as error:
        index = error.context.get("index")
        if isinstance(index, int):
            error.context["index"] = int(np.argmax(which == index))
        raise
    return list(map(of_kinds.__getitem__, which.tolist()))


def _sharded(
    batch: _Batch,
    decided: Decided,
    choose: Callable[[str, Any], Any],
    sharded: Callable[[StoredArray, object], object],
) -> list[object]:
    """Abstract arrays with the shardings that the caller's function chooses."""
    labels = decided.structure.labels()
    found = []
    for index, (number, stored) in enumerate(zip(batch.numbers, batch.stored, strict=True)):
        sharding = choose(labels[number], batch.codec.abstract(stored))
        try:
            found.append(sharded(stored, sharding))
        except WaystationError as error:
            raise error.where(index=index)
    return found


def _abstract(decided: Decided, number: int) -> Any:
    """The abstract leaf, or for scalars made of arrays a NumPy array of any dtype."""
    abstract = (decided.abstracts or [])[number]
    return registry.ANY_NUMPY if is_scalar(abstract) else abstract


def _check_cast(stored: str, wanted_dtype: str, rule: CastRule, index: int) -> None:
    try:
        casts.check(stored, wanted_dtype, rule)
    except WaystationError as error:
        raise error.where(index=index)


@contextlib.contextmanager
def _naming_leaves(decided: Decided, numbers: Sequence[int]) -> Iterator[None]:
    """Replaces a codec's index into its batch by the key path, in errors."""
    try:
        yield
    except WaystationError as error:
        index = error.context.pop("index", None)
        if isinstance(index, int):
            error.where(array=decided.name_for(error, numbers[index]))
        raise


# ---- making ------------------------------------------------------------------------------------


class _Leaves:
    """The leaves of the result as they come to be."""

    def __init__(self, decided: Decided) -> None:
        self._decided = decided
        self.made: list[Any] = [None] * len(decided.stored)

    @paused_collection()
    def make(self, codec: Codec, arrays: Sequence[Incoming], *, wait: bool = False) -> None:
        """Makes leaves of filled buffers; if told so, waits until they no longer need these."""
        targets = [incoming.target for incoming in arrays]
        with _naming_leaves(self._decided, [incoming.leaf for incoming in arrays]):
            made = codec.assemble(targets, [incoming.buffers for incoming in arrays])
            if wait:
                codec.wait(made)
        for incoming, leaf in zip(arrays, in_place.put(codec, targets, made), strict=True):
            is_no_array = incoming.stored.framework in filling.NO_ARRAYS and codec.name == "numpy"
            self.made[incoming.leaf] = self._as_saved(leaf, incoming.stored) if is_no_array else leaf

    def name_for(self, error: WaystationError, leaf: int) -> str:
        """See `Decided`."""
        return self._decided.name_for(error, leaf)

    def keep(self, numbers: Sequence[int], leaves: Sequence[Any]) -> None:
        """Takes leaves that are made already."""
        for number, leaf in zip(numbers, leaves, strict=True):
            self.made[number] = leaf

    def _as_saved(self, leaf: Buffer, stored: StoredArray) -> Any:
        """What was saved and is stored as an array."""
        if stored.framework == "python":  # unless an array is wanted
            return leaf.item() if self._decided.abstracts is None else leaf
        data = leaf.tobytes()
        return data if stored.framework == "bytes" else data.decode("utf-8", "surrogatepass")

    def put(self, part: staging.Part) -> None:
        """Puts a part into its array, which is made once it has all parts."""
        leaf = part.incoming.leaf
        try:
            made = part.whole.put(part)
            if made is not None:
                (self.made[leaf],) = in_place.put(part.whole.codec, [part.whole.incoming.target], [made])
        except WaystationError as error:
            raise error.where(array=self._decided.name_for(error, leaf))

    def scalars_from_arrays(self) -> None:
        """Turns stored arrays that are wanted as Python scalars into those."""
        for number, abstract in enumerate(self._decided.abstracts or ()):
            leaf = self.made[number]
            if is_scalar(abstract) and isinstance(leaf, np.ndarray | np.generic):
                self.made[number] = _converted(leaf.item(), abstract, self._decided, number)


def _converted(value: Scalar, abstract: Any, decided: Decided, number: int) -> Scalar:
    try:
        return convert(value, scalar_type(abstract))
    except WaystationError as error:
        raise error.where(array=decided.name_for(error, number))
