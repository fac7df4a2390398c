"""Reads what was decided and makes the leaves.

Arrays that need no cast are read in one engine job, straight to where they stay. Casts are read in
pieces of bounded size. Each framework then makes all of its arrays in one batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from waystation._collection import paused_collection
from waystation._errors import Cancelled, WaystationError
from waystation._options import Options
from waystation.checkpoint.handle import Progress
from waystation.checkpoint.wanted import Decided, convert, is_scalar, scalar_type
from waystation.frameworks import dtypes, registry
from waystation.frameworks.base import StoredArray, Target
from waystation.layouts.native import memory
from waystation.layouts.native.mapped import Mappings
from waystation.layouts.native.read import Box, OpenCheckpointable, ReadStatistics, Request, read_boxes
from waystation.layouts.native.tree_file import ArrayLeaf, Scalar

Buffer = np.ndarray[Any, Any]

CAST_PIECE_BYTES = 32 << 20


@dataclass(slots=True)
class _Batch:
    """The leaves that one codec makes."""

    numbers: list[int] = field(default_factory=list)
    stored: list[StoredArray] = field(default_factory=list)
    arrays: list[int | None] = field(default_factory=list)  # None: a stored scalar, in `values`
    values: list[Any] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    buffers: list[list[Buffer]] = field(default_factory=list)


def fill(opened: OpenCheckpointable, decided: Decided, options: Options, progress: Progress) -> list[Any]:
    """Makes the leaves of the result, in order."""
    leaves: list[Any] = [None] * len(decided.stored)
    batches = _sort(opened, decided, leaves)
    for name, batch in batches.items():
        with _naming_leaves(batch, decided):
            _choose_targets(name, batch, decided)
    statistics = ReadStatistics()
    _read(opened, [batch for batch in batches.values() if batch.numbers], options, progress, statistics)
    for name, batch in batches.items():
        with _naming_leaves(batch, decided):
            made = _assemble(name, batch)
        for number, leaf in zip(batch.numbers, made, strict=True):
            leaves[number] = leaf
    _scalars_from_arrays(decided, leaves)
    return leaves


@paused_collection()
def _sort(opened: OpenCheckpointable, decided: Decided, leaves: list[Any]) -> dict[str, _Batch]:
    """Converts scalars at once and sorts array leaves by the codec that makes them."""
    batches: dict[str, _Batch] = {}
    abstracts = decided.abstracts
    arrays = opened.tree.arrays
    for number, leaf in enumerate(decided.stored):
        abstract = None if abstracts is None else abstracts[number]
        if not isinstance(leaf, ArrayLeaf) and (abstract is None or is_scalar(abstract)):
            leaves[number] = leaf if abstract is None else _converted(leaf, abstract, decided, number)
            continue
        batch = batches.setdefault(_codec_name(opened, leaf, abstract), _Batch())
        batch.numbers.append(number)
        if isinstance(leaf, ArrayLeaf):
            batch.stored.append(arrays[leaf.array])
            batch.arrays.append(leaf.array)
            batch.values.append(None)
        else:
            value = np.asarray(leaf)
            batch.stored.append(registry.stored_scalar(value))
            batch.arrays.append(None)
            batch.values.append(value)
    return batches


def _codec_name(opened: OpenCheckpointable, leaf: Any, abstract: Any) -> str:
    if abstract is None:
        return registry.available_codec(opened.tree.arrays[leaf.array].framework).name
    codec = None if is_scalar(abstract) else registry.codec_for(abstract)
    return "numpy" if codec is None else codec.name


def _converted(value: Scalar, abstract: Any, decided: Decided, number: int) -> Scalar:
    try:
        return convert(value, scalar_type(abstract))
    except WaystationError as error:
        raise error.where(array=decided.key_path(number))


@paused_collection()
def _choose_targets(name: str, batch: _Batch, decided: Decided) -> None:
    codec = registry.codec_by_name(name)
    if decided.abstracts is None:
        batch.targets = codec.default_targets(batch.stored)
    else:
        batch.targets = codec.targets([_abstract(decided, number) for number in batch.numbers], batch.stored)
    for index, (stored, target) in enumerate(zip(batch.stored, batch.targets, strict=True)):
        if stored.dtype != target.dtype:
            _check_cast(stored.dtype, target.dtype, index)


@contextlib.contextmanager
def _naming_leaves(batch: _Batch, decided: Decided) -> Iterator[None]:
    """Replaces a codec's index into its batch by the key path, in errors."""
    try:
        yield
    except WaystationError as error:
        index = error.context.pop("index", None)
        if isinstance(index, int):
            error.where(array=decided.key_path(batch.numbers[index]))
        raise


def _abstract(decided: Decided, number: int) -> Any:
    """The abstract leaf, or for scalars made of arrays a NumPy array of any dtype."""
    abstract = (decided.abstracts or [])[number]
    return registry.ANY_NUMPY if is_scalar(abstract) else abstract


def _check_cast(stored: str, wanted: str, index: int) -> None:
    try:
        dtypes.check_cast(stored, wanted)
    except WaystationError as error:
        raise error.where(index=index)


@dataclass(slots=True)
class _Piece:
    """A part of a box that is read in the stored dtype and cast into its place."""

    request: Request
    place: Buffer


def _read(
    opened: OpenCheckpointable,
    batches: Sequence[_Batch],
    options: Options,
    progress: Progress,
    statistics: ReadStatistics,
) -> None:
    mappings = Mappings(opened) if options.array.loading.mmap else None
    if mappings is not None and options.array.loading.verify:
        mappings = None
    requests: list[Request] = []
    fills: list[list[Buffer]] = []
    pieces: list[_Piece] = []
    for batch in batches:
        for stored, array, value, target in zip(
            batch.stored, batch.arrays, batch.values, batch.targets, strict=True
        ):
            buffers: list[Buffer] = []
            batch.buffers.append(buffers)
            if array is None:
                buffers.append(_cast_value(value, target))
            elif stored.dtype != target.dtype:
                pieces.extend(_pieces(array, stored, target, buffers))
            else:
                request = Request(array, target.boxes)
                mapped = mappings.array(request) if mappings is not None else None
                if mapped is not None:
                    buffers.append(mapped)
                else:
                    requests.append(request)
                    fills.append(buffers)
    read = read_boxes(opened, requests, options, progress.add, statistics)
    for buffers, found in zip(fills, read, strict=True):
        buffers.extend(found)
    for group in _groups(pieces, opened):
        if progress.cancelled:
            raise Cancelled("loading was cancelled")
        found_pieces = read_boxes(
            opened, [piece.request for piece in group], options, progress.add, statistics
        )
        for piece, (found_piece,) in zip(group, found_pieces, strict=True):
            try:
                dtypes.copy_cast(piece.place, found_piece)
            except WaystationError as error:
                raise error.where(array=opened.tree.labels[piece.request.array])


def _cast_value(value: Any, target: Target) -> Buffer:
    dtype = dtypes.numpy_dtype(target.dtype)
    (place,) = _buffers([((), ())], dtype)
    dtypes.copy_cast(place, value)
    return place


def _pieces(array: int, stored: StoredArray, target: Target, buffers: list[Buffer]) -> Iterator[_Piece]:
    wanted, present = dtypes.numpy_dtype(target.dtype), dtypes.numpy_dtype(stored.dtype)
    buffers.extend(_buffers(target.boxes, wanted))
    items = max(1, CAST_PIECE_BYTES // (present.itemsize if present is not None else 1))
    for box, buffer in zip(target.boxes, buffers, strict=True):
        for offset, shape in _split(box, items):
            own = tuple(
                slice(at - start, at - start + extent)
                for at, start, extent in zip(offset, box[0], shape, strict=True)
            )
            yield _Piece(Request(array, [(offset, shape)]), buffer[own] if own else buffer)


def _split(box: Box, items: int) -> Iterator[Box]:
    """Cuts a box along its leading axes into boxes of at most `items` elements."""
    offset, shape = box
    axis = 0
    while math.prod(shape[axis + 1 :]) > items and axis < len(shape):
        axis += 1
    if math.prod(shape) <= items or axis == len(shape):
        yield box
        return
    if axis > 0:
        for index in range(shape[0]):
            for inner_offset, inner_shape in _split((offset[1:], shape[1:]), items):
                yield (offset[0] + index, *inner_offset), (1, *inner_shape)
        return
    step = max(1, items // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield (offset[0] + start, *offset[1:]), (min(step, shape[0] - start), *shape[1:])


def _groups(pieces: Sequence[_Piece], opened: OpenCheckpointable) -> Iterator[list[_Piece]]:
    """Pieces in runs that are read together, each run of bounded size."""
    group: list[_Piece] = []
    held = 0
    for piece in pieces:
        nbytes = piece.place.size * 16
        if group and held + nbytes > 2 * CAST_PIECE_BYTES:
            yield group
            group, held = [], 0
        group.append(piece)
        held += nbytes
    if group:
        yield group


def _buffers(boxes: Sequence[Box], dtype: Any) -> list[Buffer]:
    sizes = [math.prod(shape) * dtype.itemsize for _, shape in boxes]
    places, _ = memory.allocate(sizes)
    return [
        np.empty(shape, dtype) if slab is None else np.ndarray(shape, dtype, slab, offset)
        for (_, shape), (slab, offset) in zip(boxes, places, strict=True)
    ]


@paused_collection()
def _assemble(name: str, batch: _Batch) -> list[Any]:
    made = registry.codec_by_name(name).assemble(batch.targets, batch.buffers)
    for number, stored in enumerate(batch.stored):
        if stored.framework in ("bytes", "str") and name == "numpy":
            data = made[number].tobytes()
            made[number] = data if stored.framework == "bytes" else data.decode("utf-8", "surrogatepass")
    return list(made)


def _scalars_from_arrays(decided: Decided, leaves: list[Any]) -> None:
    """Turns stored arrays that are wanted as Python scalars into those."""
    for number, abstract in enumerate(decided.abstracts or ()):
        leaf = leaves[number]
        if is_scalar(abstract) and isinstance(leaf, np.ndarray | np.generic):
            leaves[number] = _converted(leaf.item(), abstract, decided, number)
