"""Plans of the engine: what it is to read, write or copy, as records of int64 words.

The engine's end is `plan.rs` of the crate `waystation-format`, which says what the fields mean;
`tests/vectors/plans.json` of that crate holds both ends to the same fields. Records of one *kind* are made at
once, from columns or rows. Where the number of axes or blocks differs from record to record, the words of
each are made alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words: TypeAlias = NDArray[np.int64]
Kind: TypeAlias = "np.dtype[np.void]"

WORD_BYTES = 8

_PART = ("item_bytes", "ndim", "chunk_shape", "offset", "shape", "destination", "strides")
_OF_AXES = {"chunk_shape", "offset", "shape", "strides"}  # these have a word for each axis


class Block(Protocol):
    """A block of memory from which a segment is gathered, see `frameworks.base.Block`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    device: int


def _kind(*fields: str, axes: int = 0) -> Kind:
    own = [field for field in fields if axes or field not in _OF_AXES]
    return np.dtype([(field, np.int64, (axes,) if field in _OF_AXES else ()) for field in own])


HOST_COPY = _kind("destination", "source", "nbytes")
ARRAY_COPY = _kind("device", "destination", "source", "row_bytes", "rows", "source_step")
OFFER = _kind("run", "epoch", "transfer", "address", "nbytes", "number")
FETCH = _kind("run", "epoch", "transfer", "address", "nbytes")
_BYTE_SEGMENT = _kind("file_offset", "item_bytes", "ndim", "block_count", "device", "source")


@functools.cache
def read_kind(axes: int) -> Kind:
    """Reads of boxes of chunks that have so many axes."""
    return _kind("file", "chunk_offset", *_PART, axes=axes)


def of_columns(kind: Kind, /, **columns: Any) -> Words:
    """The words of records by their columns. The first is an array; another may be one number for all."""
    assert columns.keys() == kind.fields.keys(), f"{columns.keys()} are not the columns of {kind}"  # type: ignore[union-attr]
    records = np.empty(len(columns[kind.names[0]]), kind)  # type: ignore[index]
    for field, column in columns.items():
        records[field] = column
    return records.view(np.int64)


def of_rows(kind: Kind, rows: Sequence[tuple[int, ...]]) -> Words:
    """The words of records of which each has its fields in order."""
    return np.array(rows, kind).view(np.int64)


def byte_reads(files: ArrayLike, offsets: ArrayLike, lengths: ArrayLike, destinations: ArrayLike) -> Words:
    """Reads of bytes that follow each other. The first column is an array."""
    return of_columns(
        read_kind(0),
        file=files,
        chunk_offset=offsets,
        item_bytes=lengths,
        ndim=0,
        destination=destinations,
    )


def reads(axes: int, /, **columns: Any) -> Words:
    """Reads of boxes of chunks that have so many axes: a row of words for each."""
    kind = read_kind(axes)
    columns = {field: column for field, column in columns.items() if axes or field not in _OF_AXES}
    return of_columns(kind, ndim=axes, **columns).reshape(-1, kind.itemsize // WORD_BYTES)


def part(
    item_bytes: int,
    chunk_shape: Sequence[int],
    offset: Sequence[int],
    shape: Sequence[int],
    destination: int,
    strides: Sequence[int],
) -> tuple[int, ...]:
    """A box of a chunk, and where it goes: the end of a read and of a decoding."""
    return (item_bytes, len(chunk_shape), *chunk_shape, *offset, *shape, destination, *strides)


def read(file: int, chunk_offset: int, part: tuple[int, ...]) -> tuple[int, ...]:
    """A read of a box of a stored chunk."""
    return (file, chunk_offset, *part)


def decode(
    source: int, nbytes: int, part: tuple[int, ...], *, is_compressed: bool, has_checksum: bool
) -> tuple[int, ...]:
    """The decoding of a chunk in memory."""
    return (source, nbytes, is_compressed, has_checksum, *part)


def segment(file_offset: int, item_bytes: int, shape: Sequence[int], blocks: Sequence[Block]) -> list[int]:
    """A write of an array that is gathered from blocks of memory."""
    words = [file_offset, item_bytes, len(shape), *shape, len(blocks)]
    for block in blocks:
        words += (block.device, block.address, *block.offset, *block.shape, *block.strides)
    return words


def byte_segment(file_offset: int, nbytes: int, source: int, device: int = -1) -> tuple[int, ...]:
    """A write of bytes that follow each other in memory."""
    return (file_offset, nbytes, 0, 1, device, source)


def byte_segments(begin: int, lengths: Sequence[int], sources: Sequence[int]) -> Words:
    """Writes of bytes of host memory, one after another in the file from `begin` on."""
    sizes = np.array(lengths, np.int64)
    return byte_segments_at(begin + np.cumsum(sizes) - sizes, sizes, np.array(sources, np.int64))


def byte_segments_at(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], sources: NDArray[np.int64]
) -> Words:
    """Writes of bytes of host memory to these places of the file; none of what is empty."""
    written = lengths > 0
    return of_columns(
        _BYTE_SEGMENT,
        file_offset=offsets[written],
        item_bytes=lengths[written],
        ndim=0,
        block_count=1,
        device=-1,
        source=sources[written],
    )
