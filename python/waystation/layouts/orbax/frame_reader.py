"""Reads boxes of arrays whose chunks are encoded: each chunk once, whole, and then decoded in place.

A *frame* is a chunk as it is stored: a frame of zstd or the elements themselves, and the checksum after it.
Frames are read in groups; while one is decoded by all cores, the next is read. Invariants: at most two groups
are in memory, each of a bounded size or of one frame; a frame that several boxes need is read once; a
checksum that is to be verified is, before anything is made of its frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from waystation import _native, _plans
from waystation._collection import paused_collection
from waystation._errors import WaystationError
from waystation.layouts.orbax.chunk_places import PartRead, StoredChunk, name_array
from waystation.layouts.orbax.engine import Engine
from waystation.layouts.orbax.values import Files

_GROUP_BYTES = 32 << 20
_LEAST_GROUP_BYTES = 1 << 20
_SHARES = 8  # of a bound on memory: two groups are two of them, a chunk for each thread takes of the rest
_ALIGN_BYTES = 64


class _Frame(NamedTuple):
    """A frame and all parts that are taken of its chunk."""

    chunk: StoredChunk
    reads: list[PartRead]


class _Group(NamedTuple):
    """Frames on their way into memory.

    Attributes:
        frames: The frames.
        addresses: Where each is, or will be.
        owners: What keeps that memory alive.
        job: What reads those that are in files; None if none is.
    """

    frames: list[_Frame]
    addresses: list[int]
    owners: list[object]
    job: _native.Job | None


def read_frames(reads: Sequence[PartRead], engine: Engine) -> None:
    """Reads parts of chunks that are frames.

    Raises:
        Corrupt: A frame is damaged or missing.
    """
    if not reads:
        return
    limit_bytes = engine.options.memory.read_concurrent_bytes
    share = _GROUP_BYTES if limit_bytes is None else limit_bytes // _SHARES
    group_bytes = max(_LEAST_GROUP_BYTES, min(share, _GROUP_BYTES))
    groups = _grouped(_frames(reads), group_bytes)
    started: list[_Group] = []
    try:
        for frames in groups:
            started.append(_start(frames, group_bytes, engine))
            if len(started) == 2:
                _decode(started.pop(0), engine)
        while started:
            _decode(started.pop(0), engine)
    except WaystationError as error:
        name_array(error, reads)
        raise
    finally:
        for group in started:
            if group.job is not None:
                group.job.cancel()
                group.job.wait()


@paused_collection()
def _frames(reads: Sequence[PartRead]) -> list[_Frame]:
    """The frames of parts, those of a file in the order in which they are in it."""
    found: dict[tuple[object, int], _Frame] = {}
    for read in reads:
        chunk = read.part.chunk
        assert chunk is not None
        content = chunk.value.content
        key = (chunk.value.path if content is None else id(content), chunk.offset)
        found.setdefault(key, _Frame(chunk, [])).reads.append(read)
    return sorted(found.values(), key=lambda frame: (frame.chunk.value.path, frame.chunk.offset))


def _grouped(frames: Iterable[_Frame], group_bytes: int) -> Iterator[list[_Frame]]:
    group: list[_Frame] = []
    held = 0
    for frame in frames:
        nbytes = _room(frame.chunk)
        if group and held + nbytes > group_bytes:
            yield group
            group, held = [], 0
        group.append(frame)
        held += nbytes
    if group:
        yield group


def _room(chunk: StoredChunk) -> int:
    return -(-chunk.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


@paused_collection()
def _start(frames: list[_Frame], group_bytes: int, engine: Engine) -> _Group:
    """Begins to read a group."""
    in_files = sum(_room(frame.chunk) for frame in frames if frame.chunk.value.content is None)
    # Groups of one size: the arena gives them the same memory again and again.
    slab = _native.allocate(max(group_bytes, in_files)) if in_files else None
    owners: list[object] = [slab]
    files = Files()
    reads: list[tuple[int, int, int, int]] = []
    addresses: list[int] = []
    used = 0
    for frame in frames:
        value, offset, nbytes = frame.chunk
        if value.content is not None:
            held = np.frombuffer(value.content, np.uint8, nbytes, offset)
            owners.append(held)
            addresses.append(held.__array_interface__["data"][0])
            continue
        assert slab is not None
        address = slab.address + used
        used += _room(frame.chunk)
        addresses.append(address)
        if nbytes:
            reads.append((files.number(value), offset, nbytes, address))
    words = _plans.byte_reads(*np.array(reads, np.int64).reshape(-1, 4).T)
    return _Group(frames, addresses, owners, engine.start(files, words, slab))


def _decode(group: _Group, engine: Engine) -> None:
    """Waits for a group, and puts what it holds in place."""
    if group.job is not None:
        engine.finish(group.job)
    buffers = [read.buffer for frame in group.frames for read in frame.reads]
    words = _decoding(group, engine)
    try:
        _native.decode_chunks(words, [group.owners, buffers], threads=engine.options.engine.threads)
    except WaystationError as error:
        number = error.context.pop("chunk", None)
        if number is not None:
            frame = group.frames[int(number)]
            error.where(path=frame.chunk.value.path or None, array=frame.reads[0].array.name)
        raise


@paused_collection()
def _decoding(group: _Group, engine: Engine) -> NDArray[np.int64]:
    words: list[int] = []
    for frame, address in zip(group.frames, group.addresses, strict=True):
        for read in frame.reads:
            zarr = read.array.zarr
            verify = zarr.has_checksum and engine.verifies_chunks
            nbytes = frame.chunk.nbytes if verify else frame.chunk.nbytes - zarr.checksum_bytes
            words += _plans.decode(
                address, nbytes, read.planned(), is_compressed=not zarr.is_direct, has_checksum=verify
            )
    return np.asarray(words, np.int64)
