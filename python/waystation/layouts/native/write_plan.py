"""From chunks to the data files of one process: which chunk goes where, headers, copy plans.

Pure planning: no file is touched and no array byte is read. Chunks are laid out by the alignment of their
size (multiples of 4096 first, then of 256, of 64, the rest, empty ones last), so that every chunk whose
size is a multiple of 64 starts at a multiple of 64 in its file, and large ones at a page: a reader can
then map them, or read them directly into place. Of one alignment, parts of arrays come before whole arrays:
every process has its part, one has the whole, and so parts stand at the same place in the files of all
processes, which the tables then say once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from waystation import _native
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import names, tables
from waystation.layouts.native.chunks import Chunk, is_contiguous

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


@dataclass(slots=True)
class WritePlan:
    """Everything about the data that one process writes that is known before a byte is written.

    Attributes:
        files: In writing order.
        file_entries: `FILE_ENTRY` of each; blocks are counted from the first file's.
        chunk_entries: `CHUNK_ENTRY` of each chunk; files are counted from the first.
        index: Tensor name to file name, of the chunks that are whole arrays.
        data_bytes: Bytes of all chunks.
    """

    files: list[PlannedFile]
    file_entries: tables.Table
    chunk_entries: tables.Table
    index: dict[str, str]
    data_bytes: int


def plan(
    chunks: Sequence[Chunk],
    sources: Sequence[ArraySource],
    labels: Sequence[str],
    file_bytes_target: int,
    process: int = 0,
) -> WritePlan:
    """Plans the data files of one process; `sources` and `labels` are those of all arrays."""
    nbytes = [chunk.nbytes for chunk in chunks]
    files: list[PlannedFile] = []
    chunk_entries = np.zeros(len(chunks), tables.CHUNK_ENTRY)
    index: dict[str, str] = {}
    for group in _roll_over(copy_order(chunks), nbytes, file_bytes_target):
        file = _plan_file(
            names.data_file(process, len(files)), len(files), group, chunks, sources, labels, chunk_entries
        )
        for place in group:
            if chunks[place].offset is None:
                index[labels[chunks[place].array]] = file.name
        files.append(file)
    return WritePlan(files, _file_entries(files, process), chunk_entries, index, sum(nbytes))


def copy_order(chunks: Sequence[Chunk]) -> list[int]:
    """The chunks in the order in which they stand in the files, and are copied out."""
    lengths = np.array([chunk.nbytes for chunk in chunks], np.int64)
    is_whole = np.array([chunk.offset is None for chunk in chunks], bool)
    aligned = [lengths % step == 0 for step in (4096, 256, 64)]
    ranks = np.select([lengths == 0, *aligned], [4, 0, 1, 2], 3)
    order: list[int] = np.lexsort((is_whole, ranks)).tolist()
    return order


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


def _roll_over(order: Sequence[int], sizes: Sequence[int], target: int) -> list[list[int]]:
    """Cuts the order into files; a file is closed before it would exceed the target."""
    groups: list[list[int]] = []
    start = held = 0
    for place, chunk in enumerate(order):
        if place > start and (held + sizes[chunk] > target or place - start == HEADER_KEYS):
            groups.append(list(order[start:place]))
            start, held = place, 0
        held += sizes[chunk]
    if order:
        groups.append(list(order[start:]))
    return groups


def _plan_file(
    name: str,
    sequence: int,
    group: Sequence[int],
    chunks: Sequence[Chunk],
    sources: Sequence[ArraySource],
    labels: Sequence[str],
    chunk_entries: np.ndarray,
) -> PlannedFile:
    own = [chunks[place] for place in group]
    names_of_tensors = [chunk_name(chunk, labels[chunk.array]) for chunk in own]
    if any(chunk.offset is not None for chunk in own):  # labels of whole arrays are unique already
        names_of_tensors = unique_labels(names_of_tensors)
    tensors = [
        (tensor, sources[chunk.array].storage_dtype, chunk.shape)
        for tensor, chunk in zip(names_of_tensors, own, strict=True)
    ]
    metadata = {"format": _format_tag(sources, own)}
    header = _native.build_safetensors_header(tensors, metadata, HEADER_ALIGN_BYTES)
    lengths = np.array([chunk.nbytes for chunk in own], np.int64)
    ends = len(header) + np.cumsum(lengths)
    offsets = (ends - lengths).tolist()
    words: list[int] = []
    for chunk, offset in zip(own, offsets, strict=True):
        if chunk.nbytes:
            words += segment_words(offset, chunk, sources[chunk.array].storage_item_bytes)
    places = np.asarray(group, np.int64)
    chunk_entries["file"][places] = sequence
    chunk_entries["offset"][places] = offsets
    chunk_entries["length"][places] = lengths
    return PlannedFile(name, header, int(ends[-1]), np.asarray(words, np.int64))


def _format_tag(sources: Sequence[ArraySource], chunks: Sequence[Chunk]) -> str:
    """What Hugging Face tools expect to find: the framework that made the tensors."""
    frameworks = {sources[chunk.array].framework for chunk in chunks}
    return "pt" if "torch" in frameworks else "flax" if "jax" in frameworks else "np"


def segment_words(file_offset: int, chunk: Chunk, item_bytes: int) -> list[int]:
    """The engine's record of one chunk: see `_native.start_write`."""
    blocks = chunk.blocks
    if len(blocks) == 1 and is_contiguous(blocks[0], item_bytes):
        return [file_offset, chunk.nbytes, 0, 1, blocks[0].device, blocks[0].address]
    shape = chunk.shape
    words = [file_offset, item_bytes, len(shape), *shape, len(blocks)]
    for block in blocks:
        words += [block.device, block.address, *block.offset, *block.shape, *block.strides]
    return words


def _file_entries(files: Sequence[PlannedFile], process: int) -> tables.Table:
    entries = np.zeros(len(files), tables.FILE_ENTRY)
    entries["process"] = process
    entries["sequence"] = range(len(files))
    entries["file_bytes"] = [file.file_bytes for file in files]
    entries["data_start"] = [len(file.header) for file in files]
    entries["first_block"] = tables.first_blocks(entries["file_bytes"])
    return entries
