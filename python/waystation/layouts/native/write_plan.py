"""From array sources to data files: who goes where, headers, copy plans and tables.

Pure planning: no file is touched and no array byte is read. Arrays are laid out by the alignment of
their size (multiples of 4096 first, then of 256, of 64, the rest, empty ones last), so that every
array whose size is a multiple of 64 starts at a multiple of 64 in its file, and large ones at a page:
a reader can then map them, or read them directly into place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from waystation import _native
from waystation.frameworks.base import ArraySource, Block
from waystation.layouts.native import names, tables

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
    """Everything about a checkpointable's data that is known before a byte is written.

    Attributes:
        files: In writing order.
        tables: Complete but for `checksums`, which the writing itself yields.
        labels: The tensor name of each array id.
        index: Tensor name to file name.
        data_bytes: Bytes of all arrays.
    """

    files: list[PlannedFile]
    tables: tables.Tables
    labels: list[str]
    index: dict[str, str]
    data_bytes: int


def plan(sources: Sequence[ArraySource], wanted_labels: Sequence[str], file_bytes_target: int) -> WritePlan:
    """Plans the data files of one process that holds every array whole."""
    labels = unique_labels(wanted_labels)
    nbytes = sizes(sources)
    files: list[PlannedFile] = []
    chunk_entries = np.zeros(len(sources), tables.CHUNK_ENTRY)
    index: dict[str, str] = {}
    for group in _roll_over(_copy_order(nbytes), nbytes, file_bytes_target):
        file = _plan_file(len(files), group, sources, nbytes, labels, chunk_entries)
        index.update((labels[array], file.name) for array in group)
        files.append(file)
    encoded = _tables(sources, nbytes, chunk_entries, files)
    return WritePlan(files, encoded, labels, index, sum(nbytes))


def sizes(sources: Sequence[ArraySource]) -> list[int]:
    """Bytes of each array in storage."""
    return [math.prod(source.storage_shape) * source.storage_item_bytes for source in sources]


def copy_order(sources: Sequence[ArraySource]) -> list[int]:
    """The arrays in the order in which they stand in the files, and are copied out."""
    return _copy_order(sizes(sources))


def _copy_order(nbytes: Sequence[int]) -> list[int]:
    lengths = np.asarray(nbytes, np.int64)
    aligned = [lengths % step == 0 for step in (4096, 256, 64)]
    ranks = np.select([lengths == 0, *aligned], [4, 0, 1, 2], 3)
    order: list[int] = np.argsort(ranks, kind="stable").tolist()
    return order


def unique_labels(wanted: Sequence[str]) -> list[str]:
    """Makes names that safetensors accepts and no two arrays share; they are labels, not identity."""
    if len(set(wanted)) == len(wanted) and all(map(_is_plain_label, wanted)):
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


def _is_plain_label(label: str) -> bool:
    return label.isascii() and label.isprintable() and label not in ("", "__metadata__")


def _clean_label(label: str) -> str:
    """Without NUL and lone surrogates, which no safetensors header may hold."""
    return label.encode("utf-8", "replace").decode().replace("\0", "\ufffd") or "array"


def _roll_over(order: Sequence[int], sizes: Sequence[int], target: int) -> list[list[int]]:
    """Cuts the order into files; a file is closed before it would exceed the target."""
    groups: list[list[int]] = []
    start = held = 0
    for place, array in enumerate(order):
        if place > start and (held + sizes[array] > target or place - start == HEADER_KEYS):
            groups.append(list(order[start:place]))
            start, held = place, 0
        held += sizes[array]
    if order:
        groups.append(list(order[start:]))
    return groups


def _plan_file(
    sequence: int,
    group: Sequence[int],
    sources: Sequence[ArraySource],
    nbytes: Sequence[int],
    labels: Sequence[str],
    chunk_entries: np.ndarray,
) -> PlannedFile:
    tensors = [(labels[array], sources[array].storage_dtype, sources[array].storage_shape) for array in group]
    metadata = {"format": _format_tag(sources, group)}
    header = _native.build_safetensors_header(tensors, metadata, HEADER_ALIGN_BYTES)
    lengths = np.fromiter((nbytes[array] for array in group), np.int64, len(group))
    ends = len(header) + np.cumsum(lengths)
    offsets = (ends - lengths).tolist()
    words: list[int] = []
    for array, offset in zip(group, offsets, strict=True):
        if nbytes[array]:
            words += _segment(offset, nbytes[array], sources[array])
    own = np.asarray(group, np.int64)
    chunk_entries["file"][own] = sequence
    chunk_entries["offset"][own] = offsets
    chunk_entries["length"][own] = lengths
    return PlannedFile(names.data_file(0, sequence), header, int(ends[-1]), np.asarray(words, np.int64))


def _format_tag(sources: Sequence[ArraySource], group: Sequence[int]) -> str:
    """What Hugging Face tools expect to find: the framework that made the tensors."""
    frameworks = {sources[array].framework for array in group}
    return "pt" if "torch" in frameworks else "flax" if "jax" in frameworks else "np"


def _segment(file_offset: int, nbytes: int, source: ArraySource) -> list[int]:
    """The engine's record of one array: see `_native.start_write`."""
    blocks = source.blocks
    if len(blocks) == 1 and is_contiguous(blocks[0], source.storage_item_bytes):
        return [file_offset, nbytes, 0, 1, blocks[0].device, blocks[0].address]
    shape = source.storage_shape
    words = [file_offset, source.storage_item_bytes, len(shape), *shape, len(blocks)]
    for block in blocks:
        words += [block.device, block.address, *block.offset, *block.shape, *block.strides]
    return words


def is_contiguous(block: Block, item_bytes: int) -> bool:
    """Whether a block's elements lie one after another, in C order."""
    return _is_contiguous(block.shape, block.strides, item_bytes)


# States have few shapes and many arrays.
@functools.lru_cache(maxsize=4096)
def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> bool:
    expected = item_bytes
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _tables(
    sources: Sequence[ArraySource],
    nbytes: Sequence[int],
    chunk_entries: np.ndarray,
    files: Sequence[PlannedFile],
) -> tables.Tables:
    count = len(sources)
    kept = np.fromiter((size > 0 for size in nbytes), bool, count)
    ndims = np.fromiter((len(source.storage_shape) for source in sources), np.int64, count)
    arrays = np.zeros(count, tables.ARRAY_ENTRY)
    arrays["ndim"] = ndims
    arrays["item_bits"] = [8 * source.storage_item_bytes for source in sources]
    arrays["first_chunk"] = np.cumsum(kept) - kept
    arrays["chunk_count"] = kept
    arrays["dim_count"] = 2 * ndims
    arrays["first_dim"] = np.cumsum(2 * ndims) - 2 * ndims
    # One chunk per array: the grid's chunk shape is the array's own.
    dims = [extent for source in sources for extent in source.storage_shape * 2]
    return tables.Tables(
        _file_entries(files),
        arrays,
        chunk_entries[kept],
        np.asarray(dims, "<u8"),
        np.empty(0, "<u8"),
    )


def _file_entries(files: Sequence[PlannedFile]) -> np.ndarray:
    entries = np.zeros(len(files), tables.FILE_ENTRY)
    entries["sequence"] = range(len(files))
    entries["file_bytes"] = [file.file_bytes for file in files]
    entries["data_start"] = [len(file.header) for file in files]
    blocks = -(-entries["file_bytes"].astype(np.int64) // tables.BLOCK_BYTES)
    entries["first_block"] = np.cumsum(blocks) - blocks
    return entries
