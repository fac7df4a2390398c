"""From chunks to the data files of one process: which chunk goes where, headers, copy plans.

Pure planning: no file is touched and no array byte is read. Chunks are laid out by the alignment of their
size (multiples of 4096 first, then of 256, of 64, the rest, empty ones last), so that every chunk whose
size is a multiple of 64 starts at a multiple of 64 in its file, and large ones at a page: a reader can
then map them, or read them directly into place. Of one alignment, parts of arrays come before whole arrays:
every process has its part, one has the whole, and so parts stand at the same place in the files of all
processes, which the tables then say once.

Chunks that stand in data files which the checkpoint shares with an earlier one get no new place. Chunks that
are equal there, in files that are not shared, go to files of their own after the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from waystation import _native, _plans
from waystation._distinct import distinct_objects
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import names, tables
from waystation.layouts.native.chunks import Chunk, Chunks, is_contiguous
from waystation.layouts.native.records import DataPlace

HEADER_ALIGN_BYTES = 4096

# As many tensors as readers accept in one header, one key being the header's own.
HEADER_KEYS = (1 << 20) - 1


@dataclass(slots=True)
class PlannedFile:
    """One data file to write: its name, header, size, and the engine's segment records."""

    name: str
    header: bytes
    file_bytes: int
    words: np.ndarray
    sequence: int = 0  # among the files of its process


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A data file of an earlier checkpoint that has its name in this one, too.

    Attributes:
        entry: Its `FILE_ENTRY` there.
        checksums: Of its blocks.
        place: Where it is, if that is not in the directory of the state.
    """

    entry: np.void
    checksums: bytes
    place: DataPlace | None = None

    @property
    def sequence(self) -> int:
        """Its number among the files of its process."""
        return int(self.entry["sequence"])


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """What the files of a process share with an earlier checkpoint.

    Attributes:
        files: The files, by their sequence numbers, which they keep.
        of_chunks: Of each chunk the place of its file among them; -1 for chunks that are in none.
        offsets: Where each chunk begins in its file.
        is_equal: Which chunks are equal to those of the earlier checkpoint, in shared files or not.
    """

    files: Sequence[SharedFile]
    of_chunks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    is_equal: NDArray[np.bool_]

    @classmethod
    def none(cls, count: int) -> SharedFiles:
        """Nothing is shared of so many chunks."""
        return cls([], np.full(count, -1, np.int64), np.zeros(count, np.int64), np.zeros(count, bool))


@dataclass(slots=True)
class WritePlan:
    """Everything about the data that one process writes that is known before a byte is written.

    Attributes:
        files: Those that are written, in writing order.
        file_entries: `FILE_ENTRY` of each file of this process, by sequence, also of those that are shared;
            blocks are counted from the first file's.
        chunk_entries: `CHUNK_ENTRY` of each chunk; files are counted from the first.
        index: Tensor name to file name, of the chunks that are whole arrays.
        data_bytes: Bytes of the chunks that are written.
        shared: The files that are shared.
        order: The chunks that are written, in the order of their bytes.
    """

    files: list[PlannedFile]
    file_entries: tables.Table
    chunk_entries: tables.Table
    index: dict[str, str]
    data_bytes: int
    shared: Sequence[SharedFile] = ()
    order: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def checksums(self, written: Sequence[bytes]) -> list[bytes]:
        """The block checksums of each file of `file_entries`, given those of the files that were written."""
        found = {file.sequence: file.checksums for file in self.shared}
        found |= {file.sequence: own for file, own in zip(self.files, written, strict=True)}
        return [found[sequence] for sequence in self.file_entries["sequence"].tolist()]


def plan(
    chunks: Sequence[Chunk],
    sources: Sequence[ArraySource],
    labels: Sequence[str],
    file_bytes_target: int,
    process: int = 0,
    shared: SharedFiles | None = None,
) -> WritePlan:
    """Plans the data files of one process; `sources` and `labels` are those of all arrays."""
    columns = Chunks.of(chunks)
    shared = shared or SharedFiles.none(len(columns))
    arrays = _Arrays.of(sources, labels)
    files: list[PlannedFile] = []
    chunk_entries = np.zeros(len(columns), tables.CHUNK_ENTRY)
    index: dict[str, str] = {}
    is_whole = columns.are_whole()
    order = _copy_order(columns)
    written = order[shared.of_chunks[order] < 0]
    written = written[np.argsort(shared.is_equal[written], kind="stable")]
    numbers = _free_numbers(shared.files)
    for group in _groups(written, columns.lengths, shared.is_equal, file_bytes_target):
        file = _plan_file(next(numbers), process, group, columns, arrays, chunk_entries)
        whole = columns.arrays[group[is_whole[group]]].tolist()
        index.update(dict.fromkeys(map(labels.__getitem__, whole), file.name))
        files.append(file)
    kept = np.flatnonzero(shared.of_chunks >= 0)
    sequences = np.array([file.sequence for file in shared.files], np.int64)
    chunk_entries["file"][kept] = sequences[shared.of_chunks[kept]]
    chunk_entries["offset"][kept] = shared.offsets[kept]
    chunk_entries["length"][kept] = columns.lengths[kept]
    for number in kept[is_whole[kept]].tolist():
        index[labels[int(columns.arrays[number])]] = names.data_file(
            process, int(chunk_entries["file"][number])
        )
    entries = _file_entries(files, shared.files, process)
    # Chunks have named sequence numbers so far.
    chunk_entries["file"] = np.searchsorted(entries["sequence"], chunk_entries["file"])
    data_bytes = int(columns.lengths[written].sum())
    return WritePlan(files, entries, chunk_entries, index, data_bytes, shared.files, written)


def _free_numbers(shared: Sequence[SharedFile]) -> Iterator[int]:
    """Sequence numbers that no shared file has."""
    taken = {file.sequence for file in shared}
    return (number for number in itertools.count() if number not in taken)


def _groups(
    order: NDArray[np.int64], lengths: NDArray[np.int64], is_equal: NDArray[np.bool_], target: int
) -> list[NDArray[np.int64]]:
    """The chunks of each file to be written; those that are equal to earlier ones come last in the order."""
    changed = int(np.count_nonzero(~is_equal[order]))
    parts = order[:changed], order[changed:]
    return [group for part in parts for group in _roll_over(part, lengths[part], target)]


@dataclass(frozen=True, slots=True)
class _Arrays:
    """All arrays: of each its label and its kind, and what of each kind is in files."""

    labels: Sequence[str]
    which: NDArray[np.int64]
    frameworks: list[str]
    forms: list[str]
    shapes: list[tuple[int, ...]]
    item_bytes: list[int]

    @classmethod
    def of(cls, sources: Sequence[ArraySource], labels: Sequence[str]) -> _Arrays:
        kinds, which = distinct_objects(sources)
        return cls(
            labels,
            which,
            [kind.framework for kind in kinds],
            [kind.storage_dtype for kind in kinds],
            [kind.storage_shape for kind in kinds],
            [kind.storage_item_bytes for kind in kinds],
        )


def copy_order(chunks: Sequence[Chunk]) -> list[int]:
    """The chunks in the order in which they stand in the files, and are copied out."""
    order: list[int] = _copy_order(Chunks.of(chunks)).tolist()
    return order


def moved(
    ranges: Sequence[tuple[int, int]], chunks: Sequence[Chunk], written: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Where ranges of the bytes of all chunks, in their `copy_order`, are in a plan that writes some of the
    chunks in another order; without what it does not write."""
    columns = Chunks.of(chunks)
    order = _copy_order(columns)
    ends = np.cumsum(columns.lengths[order])
    begins = ends - columns.lengths[order]
    places = np.full(len(columns), -1, np.int64)
    places[written] = np.cumsum(columns.lengths[written]) - columns.lengths[written]
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(begins, end, side="left")
        for place in range(int(first), int(last)):
            target = int(places[order[place]])
            if target >= 0:
                shift = target - int(begins[place])
                found.append((max(begin, int(begins[place])) + shift, min(end, int(ends[place])) + shift))
    return [each for each in sorted(found) if each[0] < each[1]]


def _copy_order(columns: Chunks) -> NDArray[np.int64]:
    lengths = columns.lengths
    aligned = [lengths % step == 0 for step in (4096, 256, 64)]
    ranks = np.select([lengths == 0, *aligned], [4, 0, 1, 2], 3)
    return np.lexsort((columns.are_whole(), ranks))


def unique_labels(wanted: Sequence[str]) -> list[str]:
    """Makes names that safetensors accepts and no two arrays share; they are labels, not identity."""
    distinct = set(wanted)
    together = "".join(wanted)
    is_plain = together.isascii() and together.isprintable() and distinct.isdisjoint(("", "__metadata__"))
    if is_plain and len(distinct) == len(wanted):
        return list(wanted)
    cleaned = [_clean_label(label) for label in wanted]
    taken: set[str] = {"__metadata__"}
    reserved = set(cleaned)
    labels = []
    for label in cleaned:
        candidate, number = label, 1
        while candidate in taken or (number > 1 and candidate in reserved):
            number += 1
            candidate = f"{label}~{number}"
        taken.add(candidate)
        labels.append(candidate)
    return labels


def _clean_label(label: str) -> str:
    """Without NUL and lone surrogates, which no safetensors header may hold."""
    return label.encode("utf-8", "replace").decode().replace("\0", "\ufffd") or "array"


def chunk_name(chunk: Chunk, label: str) -> str:
    """The name of a chunk's tensor: that of its array, for a part with where it begins and ends."""
    if chunk.offset is None:
        return label
    spans = zip(chunk.offset, chunk.shape, strict=True)
    return f"{label}@{','.join(f'{begin}:{begin + extent}' for begin, extent in spans)}"


def _roll_over(order: NDArray[np.int64], sizes: NDArray[np.int64], target: int) -> list[NDArray[np.int64]]:
    """Cuts the order, of chunks of these sizes, into files; a file is closed before it would exceed the
    target."""
    groups: list[NDArray[np.int64]] = []
    ends = np.cumsum(sizes)
    start = held = 0
    while start < len(order):
        fitting = int(np.searchsorted(ends, held + target, side="right"))
        stop = min(max(fitting, start + 1), start + HEADER_KEYS)
        groups.append(order[start:stop])
        start, held = stop, int(ends[stop - 1])
    return groups


def _plan_file(
    sequence: int,
    process: int,
    group: NDArray[np.int64],
    chunks: Chunks,
    arrays: _Arrays,
    chunk_entries: np.ndarray,
) -> PlannedFile:
    numbers = chunks.arrays[group]
    kinds = arrays.which[numbers].tolist()
    shapes_of_tensors = list(map(arrays.shapes.__getitem__, kinds))
    names_of_tensors = list(map(arrays.labels.__getitem__, numbers.tolist()))
    others = _others(chunks, group)
    for place, chunk in others.items():
        shapes_of_tensors[place] = chunk.shape
        names_of_tensors[place] = chunk_name(chunk, names_of_tensors[place])
    if any(chunk.offset is not None for chunk in others.values()):  # those of whole arrays are unique already
        names_of_tensors = unique_labels(names_of_tensors)
    forms = map(arrays.forms.__getitem__, kinds)
    tensors = list(zip(names_of_tensors, forms, shapes_of_tensors, strict=True))
    metadata = {"format": _format_tag(set(map(arrays.frameworks.__getitem__, set(kinds))))}
    header = _native.build_safetensors_header(tensors, metadata, HEADER_ALIGN_BYTES)
    lengths = chunks.lengths[group]
    ends = len(header) + np.cumsum(lengths)
    offsets = ends - lengths
    item_bytes = {place: arrays.item_bytes[kinds[place]] for place in others}
    words = chunk_words(offsets, lengths, chunks.addresses[group], others, item_bytes)
    chunk_entries["file"][group] = sequence
    chunk_entries["offset"][group] = offsets
    chunk_entries["length"][group] = lengths
    name = names.data_file(process, sequence)
    return PlannedFile(name, header, int(ends[-1]), words, sequence)


def _others(chunks: Chunks, group: NDArray[np.int64]) -> dict[int, Chunk]:
    """The chunks of a file that do not stand in columns, by their places in the file."""
    if not chunks.others:
        return {}
    others = ((place, chunks.others.get(number)) for place, number in enumerate(group.tolist()))
    return {place: chunk for place, chunk in others if chunk is not None}


def chunk_words(
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    addresses: NDArray[np.int64],
    others: Mapping[int, Chunk],
    item_bytes: Mapping[int, int],
) -> NDArray[np.int64]:
    """The engine's records of the chunks of a file: see `segment_words`."""
    if not others:
        return _plans.byte_segments_at(offsets, lengths, addresses)
    words: list[int] = []
    rows = zip(offsets.tolist(), lengths.tolist(), addresses.tolist(), strict=True)
    for place, (offset, nbytes, address) in enumerate(rows):
        other = others.get(place)
        if other is not None and nbytes:
            words += segment_words(offset, other, item_bytes[place])
        elif nbytes:
            words += _plans.byte_segment(offset, nbytes, address)
    return np.asarray(words, np.int64)


def _format_tag(frameworks: Set[str]) -> str:
    """What Hugging Face tools expect to find: the framework that made the tensors."""
    return "pt" if "torch" in frameworks else "flax" if "jax" in frameworks else "np"


def segment_words(file_offset: int, chunk: Chunk, item_bytes: int) -> Sequence[int]:
    """The engine's record of one chunk: see `_native.start_write`."""
    blocks = chunk.blocks
    if len(blocks) == 1 and is_contiguous(blocks[0], item_bytes):
        return _plans.byte_segment(file_offset, chunk.nbytes, blocks[0].address, blocks[0].device)
    return _plans.segment(file_offset, item_bytes, chunk.shape, blocks)


def places_of(shared: Sequence[SharedFile]) -> list[DataPlace]:
    """Where shared files are: the locations of files count them from 1."""
    return list(dict.fromkeys(file.place for file in shared if file.place is not None))


def _file_entries(files: Sequence[PlannedFile], shared: Sequence[SharedFile], process: int) -> tables.Table:
    entries = np.zeros(len(files) + len(shared), tables.FILE_ENTRY)
    numbers = {place: number for number, place in enumerate(places_of(shared), 1)}
    for place, file in enumerate(shared, len(files)):
        entries[place] = file.entry
        entries[place]["location"] = 0 if file.place is None else numbers[file.place]
    written = entries[: len(files)]
    written["sequence"] = [file.sequence for file in files]
    written["file_bytes"] = [file.file_bytes for file in files]
    written["data_start"] = [len(file.header) for file in files]
    entries["process"] = process
    entries = entries[np.argsort(entries["sequence"], kind="stable")]
    entries["first_block"] = tables.first_blocks(entries["file_bytes"])
    return entries
