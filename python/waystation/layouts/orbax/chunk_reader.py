"""Reads boxes of arrays whose chunks are stored as they are: the engine takes just the bytes that are needed.

What an OCDBT database holds in its nodes is in memory already, and copied. Chunks that are compressed, or
that only a checksum of their own vouches for, are read whole (`frame_reader.py`). Invariant: every element of
every box is written: from a chunk, or with the fill value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from waystation._collection import paused_collection
from waystation._errors import WaystationError
from waystation.grid import Box, slices_of_box
from waystation.layouts.orbax import frame_reader
from waystation.layouts.orbax.chunk_places import NamedArray, Part, PartRead, name_array
from waystation.layouts.orbax.engine import Engine
from waystation.layouts.orbax.values import Files
from waystation.layouts.orbax.zarr import ZarrArray


class Destination(NamedTuple):
    """A box that is to be read, and where to."""

    array: int
    box: Box  # in elements as they are stored
    buffer: np.ndarray[Any, Any]  # C-contiguous


def read_chunks(
    arrays: Sequence[NamedArray],
    located: Sequence[list[Part]],
    destinations: Sequence[Destination],
    engine: Engine,
) -> None:
    """Reads the parts that `ChunkPlaces.locate` found of boxes into their buffers."""
    direct: list[PartRead] = []
    frames: list[PartRead] = []
    for parts, destination in zip(located, destinations, strict=True):
        array = arrays[destination.array]
        for part in parts:
            read = PartRead(array, part, destination.buffer)
            if part.chunk is None:
                destination.buffer[_own(part)] = array.zarr.fill_element()
            elif not array.zarr.is_direct or (array.zarr.has_checksum and engine.verifies_chunks):
                frames.append(read)
            elif part.chunk.value.content is not None:
                _copy(read, part.chunk.value.content)
            else:
                direct.append(read)
    _read_direct(direct, engine)
    frame_reader.read_frames(frames, engine)


def _own(part: Part) -> tuple[slice, ...]:
    return slices_of_box((part.in_box, part.shape))


def _copy(read: PartRead, content: bytes) -> None:
    """Takes a part out of a chunk that is in memory."""
    zarr, part = read.array.zarr, read.part
    assert part.chunk is not None
    chunk = _as_chunk(content, part.chunk.offset, zarr, read.buffer.dtype)
    read.buffer[_own(part)] = chunk[slices_of_box((part.in_chunk, part.shape))]


def _as_chunk(content: bytes, offset: int, zarr: ZarrArray, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.ndarray(zarr.read_shape, dtype, content, offset)


def _read_direct(reads: Sequence[PartRead], engine: Engine) -> None:
    files, words = _plan(reads)
    try:
        engine.read(files, words, [read.buffer for read in reads])
    except WaystationError as error:
        name_array(error, reads)
        raise


@paused_collection()
def _plan(reads: Sequence[PartRead]) -> tuple[Files, NDArray[np.int64]]:
    files = Files()
    words: list[int] = []
    for read in reads:
        chunk = read.part.chunk
        assert chunk is not None
        words += (files.number(chunk.value), chunk.offset, *read.chunk_words())
    return files, np.asarray(words, np.int64)
