"""From boxes of arrays to the engine's read plan.

A whole array stored as one chunk is one fixed record; these are the many, so they are made in one
vectorised step. Every other box becomes one record per chunk that it meets: first the chunks of all boxes are
found, then their places, so that tables that are read page by page are read in few calls. What boxes take of
chunks is a row of a matrix for each number of axes. Boxes of arrays in regular grids, which a load over other
devices has by the thousand, are cut in one vectorised step too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waystation import _plans, grid
from waystation._collection import paused_collection
from waystation._distinct import distinct
from waystation._errors import Corrupt, InvalidInput, WaystationError
from waystation.frameworks.base import StoredArray
from waystation.grid import Box
from waystation.layouts.native import places, tables
from waystation.layouts.opened import Request

if TYPE_CHECKING:
    from waystation.frameworks.dtypes import LogicalDtype

# The chunks that a box meets, and what it takes of each: number, box and common part, one by one or of all.
_Found: TypeAlias = list[tuple[int, Box, Box]] | tuple[NDArray[np.int64], grid.BoxArray, grid.BoxArray]


# Of parts of files: the file, where it begins there, its length, and where in memory it goes.
_Extents: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


class MissingBox(InvalidInput):
    """A host's part of a checkpoint in local storage lacks something that is to be read.

    Attributes:
        array: The number of the array.
        box: What is missing of it, the first if there is more; in terms of its storage.
    """

    array = -1
    box: Box = ((), ())


_GRIDS = (tables.REGULAR, tables.RUNS)
# More than a table of 64-bit places can list.
_MOST_CHUNKS = 1 << 62
# From so many chunks on it is quicker to find them, and what a box takes of them, at once.
_MANY_CHUNKS = 8
# The first columns of a row: the place of its box among all, the array, the number of the chunk, the bytes of
# an item, and where the box goes. Then come, with an entry for each axis: offset and shape of the chunk, and
# those of what the box takes of it, the offset of the box, and its strides in bytes.
_PLAIN_COLUMNS = 5


# The first columns of a row of a box: its place among all, the array, the bytes of an item, and where it
# goes. Then come its offset and shape, with an entry for each axis.
_BOX_COLUMNS = 4


class _Pieces:
    """What boxes take of chunks, row by row."""

    def __init__(self) -> None:
        self._single: dict[int, list[int]] = {}  # by the number of axes, rows one after another
        self._blocks: dict[int, list[NDArray[np.int64]]] = {}

    def add(self, position: int, array: int, item_bytes: int, box: Box, address: int, found: _Found) -> None:
        """Adds what one box takes."""
        ndim = len(box[0])
        strides = grid.contiguous_strides(box[1], item_bytes)
        if isinstance(found, list):
            single = self._single.setdefault(ndim, [])
            for number, chunk, common in found:
                single += (position, array, number, item_bytes, address)
                single += (*chunk[0], *chunk[1], *common[0], *common[1], *box[0], *strides)
            return
        numbers, chunks, commons = found
        rows = np.empty((len(numbers), _PLAIN_COLUMNS + 6 * ndim), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4] = (
            position,
            array,
            numbers,
            item_bytes,
            address,
        )
        of_axes = _of_axes(rows, ndim)
        of_axes[:, 0:2], of_axes[:, 2:4] = chunks, commons
        of_axes[:, 4], of_axes[:, 5] = box[0], strides
        self.add_rows(ndim, rows)

    def add_rows(self, ndim: int, rows: NDArray[np.int64]) -> None:
        """Adds rows as they are."""
        self._blocks.setdefault(ndim, []).append(rows)

    def by_axes(self) -> list[tuple[int, NDArray[np.int64]]]:
        """The numbers of axes, each with its rows, whose first column is their own place among all now: those
        of one box come one after another, in the order of the boxes."""
        found = []
        for ndim in self._single.keys() | self._blocks.keys():
            rows = np.array(self._single.get(ndim, ()), np.int64).reshape(-1, _PLAIN_COLUMNS + 6 * ndim)
            found.append((ndim, np.concatenate([rows, *self._blocks.get(ndim, ())])))
        boxes = np.concatenate([rows[:, 0] for _, rows in found]) if found else np.empty(0, np.int64)
        order = np.empty(len(boxes), np.int64)
        order[np.argsort(boxes, kind="stable")] = np.arange(len(boxes))
        ends = np.cumsum([len(rows) for _, rows in found])
        for (_, rows), end in zip(found, ends, strict=True):
            rows[:, 0] = order[end - len(rows) : end]
        return found


@paused_collection()
def read_words(
    decoded: tables.Tables,
    requests: Sequence[Request],
    forms: Sequence[LogicalDtype],
    addresses: Sequence[int],
    sizes: Sequence[int],
    stored: Sequence[StoredArray],
    labels: Sequence[str],
    found: list[list[Box]] | None = None,
    chunks: NDArray[np.int64] | None = None,
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Plans the read of every box of every request into buffers given by address and bytes, in order.

    Args:
        decoded: The tables.
        requests: What is to be read.
        forms: The dtypes of the arrays requested.
        addresses: Where each box goes.
        sizes: Its bytes.
        stored: What the tree says of all arrays.
        labels: Their key paths.
        found: Where given, boxes may have holes: a list for each box, to which the parts of it that are read
            are added, in terms of the storage of its array.
        chunks: What is read besides, a row for each: the place of a chunk, where it goes, and its bytes.

    Returns:
        The records of `_native.start_read`, and the numbers of the files that they use: records
        count files by their place in that list.

    Raises:
        Corrupt: The tables contradict the tree or each other.
        MissingBox: The tables are those of one host's storage, which holds only a part of a box.
    """
    shapes = _Shapes(decoded, [request.array for request in requests], stored, labels)
    pieces = _Pieces()
    in_grids: dict[int, list[int]] = {}  # boxes, by their number of axes, as rows one after another
    position = 0
    for request, form in zip(requests, forms, strict=True):
        array, trailing = request.array, form.trailing
        zeros = (0,) * len(trailing)
        item_bytes = shapes.item_bytes[array]
        end = position + len(request.boxes)
        if any(sizes[position:end]) and item_bytes * math.prod(trailing) != _item_bytes(form):
            raise Corrupt(f"array {array} has another item size in the chunk table than in the tree")
        if request.missing is None and shapes.kind[array] in _GRIDS:
            rows = in_grids.setdefault(len(shapes.array[array]), [])
            for place, (offset, shape) in zip(range(position, end), request.boxes, strict=True):
                if sizes[place]:
                    rows += (place, array, item_bytes, addresses[place], *offset, *zeros, *shape, *trailing)
                    if found is not None:
                        found[place].append(((*offset, *zeros), (*shape, *trailing)))
        else:
            for number, (offset, shape) in enumerate(request.boxes):
                if sizes[position + number]:
                    box = (*offset, *zeros), (*shape, *trailing)
                    parts = [box] if request.missing is None else request.missing[number]
                    own = _find(
                        decoded,
                        shapes,
                        array,
                        parts,
                        labels,
                        found[position + number] if found is not None else None,
                    )
                    for each in own:
                        pieces.add(
                            position + number, array, item_bytes, box, addresses[position + number], each
                        )
        position = end
    whole = [chunks] if chunks is not None else []
    for ndim, rows in in_grids.items():
        whole.append(_cut(shapes, ndim, np.array(rows, np.int64), pieces, labels))
    rows_of_whole = np.concatenate(whole) if whole else np.empty((0, 3), np.int64)
    return _joined(_whole(decoded, rows_of_whole), decoded, pieces)


def _find(
    decoded: tables.Tables,
    shapes: _Shapes,
    array: int,
    parts: Sequence[Box],
    labels: Sequence[str],
    found: list[Box] | None,
) -> list[_Found]:
    """The chunks of parts of a box; there may be holes where `found` is given, which gets what there is."""
    try:
        own = [_meeting(decoded, shapes, array, part) for part in parts]
        if found is None:
            _check_covered(shapes.kind[array], array, parts, own)
    except WaystationError as error:
        raise error.where(array=labels[array])
    if found is not None:
        found += (common for each in own for common in _commons(each))
    return own


def _item_bytes(form: LogicalDtype) -> int:
    return form.host.itemsize * math.prod(form.host_trailing)


def _cut(
    shapes: _Shapes, ndim: int, rows: NDArray[np.int64], pieces: _Pieces, labels: Sequence[str]
) -> NDArray[np.int64]:
    """Cuts boxes of arrays in regular grids along the chunks.

    Args:
        shapes: What the tables say of the arrays.
        ndim: The number of axes.
        rows: The boxes, in the columns of `_BOX_COLUMNS`, one after another.
        pieces: Gets what they take of chunks.
        labels: The key paths of all arrays.

    Returns:
        Those that are a whole array in one listed chunk, which are no pieces: a row for each, of the place of
        the chunk, where it goes, and its bytes.

    Raises:
        Corrupt: A box is not inside its array.
    """
    rows = rows.reshape(-1, _BOX_COLUMNS + 2 * ndim)
    numbers, which = np.unique(rows[:, 1], return_inverse=True)
    extents, steps, singles = (column[which] for column in shapes.grids(numbers.tolist(), ndim, labels))
    offsets, lengths = rows[:, _BOX_COLUMNS:].reshape(len(rows), 2, ndim).transpose(1, 0, 2)
    beyond = np.flatnonzero(((offsets < 0) | (lengths > extents - offsets)).any(axis=1))
    if len(beyond):
        array = int(rows[beyond[0], 1])
        raise Corrupt(f"the chunks of array {array} leave a hole in it", array=labels[array])
    is_whole = (singles >= 0) & (lengths == extents).all(axis=1)
    own = rows[is_whole]
    sizes = lengths[is_whole].prod(axis=1) * own[:, 2]
    rest = ~is_whole
    cut = _cut_along(rows[rest], offsets[rest], lengths[rest], extents[rest], steps[rest])
    pieces.add_rows(ndim, cut)
    return np.stack([singles[is_whole], own[:, 3], sizes], axis=1)


def _cut_along(
    rows: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    extents: NDArray[np.int64],
    steps: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The rows of what boxes take of the chunks of their grids: of each box in the order of the chunks.

    Args:
        rows: The boxes.
        offsets: Theirs, like all that follows a row for each with an entry for each axis.
        lengths: Their shapes.
        extents: Those of their arrays.
        steps: The shapes of chunks.
    """
    ndim = offsets.shape[1]
    firsts = offsets // steps
    counts = (offsets + lengths - 1) // steps - firsts + 1
    of_each = counts.prod(axis=1)
    box = np.repeat(np.arange(len(rows)), of_each)
    rest = np.arange(len(box)) - np.repeat(np.cumsum(of_each) - of_each, of_each)
    cut = np.empty((len(box), _PLAIN_COLUMNS + 6 * ndim), np.int64)
    cut[:, 0], cut[:, 1], cut[:, 3], cut[:, 4] = rows[box, 0], rows[box, 1], rows[box, 2], rows[box, 3]
    numbers = np.zeros(len(box), np.int64)
    chunk, chunk_shape, common, common_shape, box_offset, strides = _of_axes(cut, ndim).transpose(1, 2, 0)
    stride = np.ones(len(rows), np.int64)
    bytes_apart = rows[:, 2].copy()
    for axis in reversed(range(ndim)):
        offset, length, extent, step = (column[:, axis][box] for column in (offsets, lengths, extents, steps))
        rest, place = np.divmod(rest, counts[:, axis][box])
        place += firsts[:, axis][box]
        numbers += place * stride[box]
        chunk[axis] = place * step
        chunk_shape[axis] = np.minimum(step, extent - chunk[axis])
        common[axis] = np.maximum(chunk[axis], offset)
        common_shape[axis] = np.minimum(chunk[axis] + chunk_shape[axis], offset + length) - common[axis]
        box_offset[axis], strides[axis] = offset, bytes_apart[box]
        stride *= -(-extents[:, axis] // steps[:, axis])
        bytes_apart *= lengths[:, axis]
    cut[:, 2] = numbers
    return cut


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays that are read whole.

    Attributes:
        numbers: Their numbers.
        kinds: What the tree says of them.
        which: Of each, which of these.
        forms: The dtypes of the kinds.
    """

    numbers: NDArray[np.int64]
    kinds: Sequence[StoredArray]
    which: NDArray[np.int64]
    forms: Sequence[LogicalDtype]


def words_of_arrays(
    decoded: tables.Tables,
    arrays: Arrays,
    addresses: NDArray[np.int64],
    sizes: NDArray[np.int64],
    stored: Sequence[StoredArray],
    labels: Sequence[str],
    others: Sequence[tuple[Request, LogicalDtype]],
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Plans the read of whole arrays, and of other boxes after them, into buffers given by address and bytes:
    see `read_words`."""
    count = len(arrays.numbers)
    singles = _single_chunks(decoded, arrays, labels)
    rest = np.flatnonzero(singles < 0)
    own = zip(arrays.numbers[rest].tolist(), arrays.which[rest].tolist(), strict=True)
    several = [
        (Request(number, [grid.whole(arrays.kinds[kind].shape)]), arrays.forms[kind]) for number, kind in own
    ]
    requests = [*several, *others]
    places = np.concatenate([rest, np.arange(count, len(sizes))])
    chosen = np.flatnonzero((singles >= 0) & (sizes[:count] > 0))
    return read_words(
        decoded,
        [request for request, _ in requests],
        [form for _, form in requests],
        addresses[places].tolist(),
        sizes[places].tolist(),
        stored,
        labels,
        chunks=np.stack([singles[chosen], addresses[chosen], sizes[chosen]], axis=1),
    )


def _single_chunks(decoded: tables.Tables, arrays: Arrays, labels: Sequence[str]) -> NDArray[np.int64]:
    """The place of the chunk of each array that is one; -1 for others."""
    shapes, which = [kind.storage_shape for kind in arrays.kinds], arrays.which
    entries = decoded.arrays[arrays.numbers]
    firsts = entries["first_dim"].astype(np.int64)
    differs = differing_shapes(decoded.dims, firsts, entries["ndim"], shapes, which)
    if differs.any():
        raise Corrupt(
            "the chunk table and the tree differ in an array's shape",
            array=labels[int(arrays.numbers[np.argmax(differs)])],
        )
    is_once = (entries["kind"] == tables.REGULAR) & (entries["chunk_count"] == 1)
    begins = firsts + entries["ndim"]
    once = np.flatnonzero(is_once)
    is_once[once] = ~differing_shapes(decoded.dims, begins[once], entries["ndim"][once], shapes, which[once])
    return np.where(is_once, entries["first_chunk"].astype(np.int64), -1)


def differing_shapes(
    dims: Any,
    begins: NDArray[np.int64],
    ndims: NDArray[Any],
    shapes: Sequence[tuple[int, ...]],
    which: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Whether what tables say of shapes is something else than what is expected.

    Args:
        dims: The extents that the tables have.
        begins: Where each shape begins there.
        ndims: Its number of axes.
        shapes: The shapes that are expected.
        which: For each, which of these.
    """
    lengths = np.array([len(shape) for shape in shapes], np.int64)
    differs: NDArray[np.bool_] = lengths[which] != ndims
    same = np.flatnonzero(~differs)
    counts = lengths[which[same]]
    axes = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    expected = np.array([extent for shape in shapes for extent in shape], np.uint64)
    firsts = (np.cumsum(lengths) - lengths)[which[same]]
    found = dims[np.repeat(begins[same], counts) + axes]
    differs[np.repeat(same, counts)[found != expected[np.repeat(firsts, counts) + axes]]] = True
    return differs


class _Shapes:
    """What the tables say of the arrays that are wanted, as plain values: one conversion of a column instead
    of one per access."""

    def __init__(
        self,
        decoded: tables.Tables,
        wanted: Sequence[int],
        stored: Sequence[StoredArray],
        labels: Sequence[str],
    ) -> None:
        numbers = distinct(np.asarray(wanted, np.int64))
        entries = decoded.arrays[numbers]
        has_grid = (entries["kind"] == tables.REGULAR) | (entries["kind"] == tables.RUNS)
        ndims = entries["ndim"].astype(np.int64)
        widths = ndims * (1 + has_grid)
        begins = np.cumsum(widths) - widths
        firsts = entries["first_dim"].astype(np.int64)
        words = decoded.dims[np.repeat(firsts - begins, widths) + np.arange(int(widths.sum()))].tolist()
        _prefetch_boxes(decoded, entries[~has_grid])
        self.kind = dict(zip(numbers.tolist(), entries["kind"].tolist(), strict=True))
        self.item_bytes = dict(zip(numbers.tolist(), (entries["item_bits"] // 8).tolist(), strict=True))
        self.array: dict[int, tuple[int, ...]] = {}
        self.chunk: dict[int, tuple[int, ...]] = {}
        self.single_chunks: dict[int, int] = {}  # of each array that is one chunk, the place of its entry
        is_listed_once = ((entries["kind"] == tables.REGULAR) & (entries["chunk_count"] == 1)).tolist()
        rows = zip(
            numbers.tolist(),
            begins.tolist(),
            ndims.tolist(),
            (begins + widths).tolist(),
            is_listed_once,
            entries["first_chunk"].tolist(),
            strict=True,
        )
        for array, begin, ndim, end, is_once, first_chunk in rows:
            shape = tuple(words[begin : begin + ndim])
            if shape != stored[array].storage_shape:
                raise Corrupt(
                    "the chunk table and the tree differ in an array's shape",
                    array=labels[array],
                )
            self.array[array] = shape
            self.chunk[array] = tuple(words[begin + ndim : end])
            if 0 in self.chunk[array] and 0 not in shape:
                raise Corrupt("the chunks of an array have an extent of 0", array=labels[array])
            if is_once and self.chunk[array] == shape:
                self.single_chunks[array] = first_chunk
        self._grids: dict[int, grid.ChunkGrid] = {}

    def grids(
        self, arrays: Sequence[int], ndim: int, labels: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of arrays in regular grids of one number of axes: the extents, the shapes of chunks, and the places
        of the entries of those that are one listed chunk, -1 for others.

        Raises:
            Corrupt: An array has more chunks than can be.
        """
        extents = [self.array[array] for array in arrays]
        # No chunk is larger than its array here, since what the tables say of it may not fit 64 bits.
        steps = [tuple(map(min, self.chunk[array], self.array[array])) for array in arrays]
        for array, of_array, of_chunk in zip(arrays, extents, steps, strict=True):
            counts = (-(-extent // step) for extent, step in zip(of_array, of_chunk, strict=True))
            if math.prod(counts) > _MOST_CHUNKS or math.prod(of_array) > _MOST_CHUNKS:
                raise Corrupt(f"array {array} of shape {of_array} has too many chunks", array=labels[array])
        return (
            np.array(extents, np.int64).reshape(len(arrays), ndim),
            np.array(steps, np.int64).reshape(len(arrays), ndim),
            np.array([self.single_chunks.get(array, -1) for array in arrays], np.int64),
        )

    def grid(self, array: int) -> grid.ChunkGrid:
        """The regular grid of an array's chunks."""
        found = self._grids.get(array)
        if found is None:
            found = self._grids[array] = grid.ChunkGrid(self.array[array], self.chunk[array])
        return found


def _prefetch_boxes(decoded: tables.Tables, entries: tables.Table) -> None:
    """Reads the bounding boxes of the groups of arrays in boxes."""
    ndims, counts = entries["ndim"].astype(np.int64), entries["chunk_count"].astype(np.int64)
    begins = entries["first_dim"].astype(np.int64) + ndims
    places.prefetch(decoded.dims, begins, begins + 2 * ndims * -(-counts // grid.GROUP_BOXES))


def _whole(decoded: tables.Tables, whole: NDArray[np.int64]) -> _Extents:
    numbers, addresses, sizes = whole.T
    if not len(whole):
        return numbers, numbers, numbers, numbers
    chunks = decoded.chunks[numbers]
    files, offsets, lengths = (chunks[field].astype(np.int64) for field in ("file", "offset", "length"))
    if np.any(lengths != sizes):
        raise Corrupt("a chunk has a length that does not fit the shape of its array")
    places.check_inside(decoded, files, offsets, lengths)
    return files, offsets, lengths, addresses


def _meeting(decoded: tables.Tables, shapes: _Shapes, array: int, part: Box) -> _Found:
    """The chunks that a part of a box meets, and what it takes of each."""
    if shapes.kind[array] in _GRIDS:
        chunks = shapes.grid(array)
        if chunks.count_meeting(part) < _MANY_CHUNKS:
            meeting = [(number, chunk, grid.intersect(chunk, part)) for number, chunk in chunks.meeting(part)]
            return [(number, chunk, common) for number, chunk, common in meeting if common is not None]
        numbers, boxes = chunks.meeting_in_bulk(part)
    else:
        entry = decoded.arrays[array]
        begin = int(entry["first_dim"]) + int(entry["ndim"])
        numbers, boxes = grid.irregular_chunks_meeting(decoded.dims, int(entry["chunk_count"]), part, begin)
    offset, shape = np.array(part, np.int64).reshape(2, -1)
    offsets = np.maximum(boxes[:, 0], offset)
    commons = np.stack([offsets, np.minimum(boxes[:, 0] + boxes[:, 1], offset + shape) - offsets], axis=1)
    return numbers, boxes, commons


def _commons(found: _Found) -> list[Box]:
    """What a box takes of chunks, without these."""
    if isinstance(found, list):
        return [common for _, _, common in found]
    return [(tuple(offset), tuple(shape)) for offset, shape in found[2].tolist()]


def _volume(found: _Found) -> int:
    """The elements that a box takes of chunks."""
    if isinstance(found, list):
        return sum(grid.volume(common) for _, _, common in found)
    return int(found[2][:, 1].prod(axis=1).sum())


def _check_covered(kind: int, array: int, parts: Sequence[Box], own: Sequence[_Found]) -> None:
    for part, found in zip(parts, own, strict=True):
        if _volume(found) != grid.volume(part):
            raise _not_covered(kind, array, part, _commons(found))


def _not_covered(kind: int, array: int, box: Box, present: Sequence[Box]) -> WaystationError:
    """Why a box cannot be read, of which only some parts are there."""
    if kind != tables.PARTIAL:
        return Corrupt(f"the chunks of array {array} leave a hole in it")
    defect = grid.find_cover_defect(box[1], [grid.relative_to(part, box[0]) for part in present])
    assert defect is not None, "boxes with fewer elements than theirs leave a hole, or overlap"
    offset = tuple(start + at for start, at in zip(box[0], defect.box[0], strict=True))
    shown = ", ".join(
        f"{begin}:{begin + extent}" for begin, extent in zip(offset, defect.box[1], strict=True)
    )
    error = MissingBox(
        f"this host's part of a checkpoint in local storage does not have [{shown}] of array {array}; load "
        "it with the same devices on the same hosts as it was saved, or save to storage that all hosts share"
    )
    error.array, error.box = array, (offset, defect.box[1])
    return error


def is_held(
    decoded: tables.Tables, array: int, box: Box, stored: Sequence[StoredArray], labels: Sequence[str]
) -> bool:
    """Whether all of a box of an array, in terms of its storage, can be read."""
    shapes = _Shapes(decoded, [array], stored, labels)
    return _volume(_meeting(decoded, shapes, array, box)) == grid.volume(box)


def _joined(whole: _Extents, decoded: tables.Tables, pieces: _Pieces) -> tuple[NDArray[np.int64], list[int]]:
    """Makes a record for each piece, in their order, after those of whole arrays.

    Records count files by their place among those that are used.
    """
    by_axes = pieces.by_axes()
    count = sum(len(rows) for _, rows in by_axes)
    arrays, chunks, lengths, widths = (np.empty(count, np.int64) for _ in range(4))
    for ndim, rows in by_axes:
        order = rows[:, 0]
        arrays[order], chunks[order] = rows[:, 1], rows[:, 2]
        lengths[order] = _of_axes(rows, ndim)[:, 1].prod(axis=1) * rows[:, 3]
        widths[order] = _plans.read_kind(ndim).itemsize // _plans.WORD_BYTES
    files, offsets = places.find_places(decoded, arrays, chunks, lengths) if count else (arrays, arrays)
    used = distinct(np.concatenate([whole[0], files]))
    head = _plans.byte_reads(np.searchsorted(used, whole[0]), *whole[1:])
    files = np.searchsorted(used, files)
    starts = head.size + np.cumsum(widths) - widths
    words = np.empty(head.size + int(widths.sum()), np.int64)
    words[: head.size] = head
    for ndim, rows in by_axes:
        order, of_axes = rows[:, 0], _of_axes(rows, ndim)
        chunk_offset, chunk_shape, offset, shape, box_offset, strides = of_axes.transpose(1, 0, 2)
        records = _plans.reads(
            ndim,
            file=files[order],
            chunk_offset=offsets[order],
            item_bytes=rows[:, 3],
            chunk_shape=chunk_shape,
            offset=offset - chunk_offset,
            shape=shape,
            destination=rows[:, 4] + ((offset - box_offset) * strides).sum(axis=1),
            strides=strides,
        )
        words[starts[order][:, None] + np.arange(records.shape[1])] = records
    return words, used.tolist()


def _of_axes(rows: NDArray[np.int64], ndim: int) -> NDArray[np.int64]:
    """The columns of rows that have an entry for each axis."""
    return rows[:, _PLAIN_COLUMNS:].reshape(len(rows), 6, ndim)
