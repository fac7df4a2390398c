"""Imagined programs whose processes write boxes of arrays, and read plans followed in plain memory.

Parts come from the real planner of writes and tables from the real merge; only the engine's part, moving
bytes between files and memory, is done here by NumPy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from waystation import _native, grid
from waystation.frameworks import dtypes
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import boxes, merge, places, tables
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.paged import PAGE_BYTES
from waystation.layouts.native.write_plan import plan
from waystation.layouts.opened import Request

Box = grid.Box
Written = Sequence[tuple[int, Box]]  # the array and the box of each chunk
PATHS = ("files.bin", "chunks.bin", "checksums.bin")


@st.composite
def partitions(draw: Any, shape: tuple[int, ...], most_cuts: int = 12) -> list[Box]:
    """Boxes that cover an array exactly once, by cutting one of them in two again and again."""
    found = [grid.whole(shape)]
    for _ in range(draw(st.integers(0, most_cuts))):
        offset, extents = found.pop(draw(st.integers(0, len(found) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extents[axis]))
        low, high, begin = list(extents), list(extents), list(offset)
        low[axis], high[axis], begin[axis] = at, extents[axis] - at, offset[axis] + at
        halves = [(offset, tuple(low)), (tuple(begin), tuple(high))]
        found += [half for half in halves if grid.volume(half)]
    return found


def source(shape: tuple[int, ...]) -> ArraySource:
    """An array without memory."""
    return ArraySource(shape, "int16", "numpy", "I16", shape, storage_item_bytes=2, blocks=[], mutable=False)


class Program:
    """Arrays with values, and what the processes that hold them have written.

    Attributes:
        sources: The arrays.
        labels: Their key paths.
        values: What they hold.
        parts: What each process says that it has written.
        files: The content of every data file, in table order.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        written: Sequence[Written],
        *,
        file_bytes_target: int = 1 << 20,
    ) -> None:
        random = np.random.default_rng(0)
        self.sources = [source(shape) for shape in shapes]
        self.labels = [f"layer.{number}" for number in range(len(shapes))]
        self.values = [np.asarray(random.integers(0, 100, shape)).astype(np.int16) for shape in shapes]
        self.parts: list[merge.Part] = []
        self.files: list[bytes] = []
        self._file_bytes_target = file_bytes_target
        for process, own in enumerate(written):
            self._write(process, own)

    def _write(self, process: int, written: Written) -> None:
        chunks = []
        for array, box in written:
            shape, item_bytes = self.sources[array].shape, self.sources[array].storage_item_bytes
            offset = None if box == grid.whole(shape) else box[0]
            chunks.append(Chunk(array, offset, box[1], grid.volume(box) * item_bytes, []))
        planned = plan(chunks, self.sources, self.labels, self._file_bytes_target, process)
        contents = [bytearray(file.file_bytes) for file in planned.files]
        for (array, box), entry in zip(written, planned.chunk_entries, strict=True):
            begin, data = int(entry["offset"]), self.values[array][grid.slices_of_box(box)].tobytes()
            contents[int(entry["file"])][begin : begin + len(data)] = data
        sums = [checksums(process, content) for content in contents]
        self.parts.append(merge.Part.decode(merge.Part.of(planned, chunks, sums).encode()))
        self.files += [bytes(content) for content in contents]

    def merge(self, **options: Any) -> tables.Tables:
        """The tables of all processes, as they are read from disk."""
        merged = merge.merge(self.parts, self.sources, self.labels, **options)
        encoded = merged.encode_files(), merged.encode_chunks(), merged.encode_checksums()
        return tables.decode(*encoded, PATHS)

    def write(self, directory: Path, **options: Any) -> tables.Tables:
        """The tables of all processes, on disk, to be read page by page."""
        merged = merge.merge(self.parts, self.sources, self.labels, **options)
        encoded = merged.encode_files(), merged.encode_chunks(), merged.encode_checksums()
        for name, content in zip(PATHS, encoded, strict=True):
            (directory / name).write_bytes(content)
        return open_paged(directory)

    def read(self, decoded: tables.Tables, requests: Sequence[Request]) -> list[np.ndarray[Any, Any]]:
        """Plans the read of boxes and follows the plan."""
        forms = [dtypes.of_stored(self.sources[request.array]) for request in requests]
        wanted = [
            (box[1], form.host)
            for request, form in zip(requests, forms, strict=True)
            for box in request.boxes
        ]
        sizes = [math.prod(shape) * host.itemsize for shape, host in wanted]
        addresses = (np.cumsum(sizes) - sizes).tolist() if sizes else []
        words, used = boxes.read_words(decoded, requests, forms, addresses, sizes, self.sources, self.labels)
        memory = bytearray(sum(sizes))
        follow(words, [self.files[file] for file in used], memory)
        return [
            np.ndarray(shape, host, memory, address)
            for (shape, host), address in zip(wanted, addresses, strict=True)
        ]


def open_paged(directory: Path) -> tables.Tables:
    """Opens the tables in a directory."""
    paths = [directory / name for name in PATHS]
    first, second, third = map(str, paths)
    sizes = [path.stat().st_size for path in paths]
    return tables.open_paged((first, second, third), (sizes[0], sizes[1], sizes[2]))


def with_checksums(pages: bytes) -> bytes:
    """The pages of a table with the checksums that their contents call for."""
    found = b""
    for number in range(len(pages) // PAGE_BYTES):
        payload = pages[number * PAGE_BYTES : (number + 1) * PAGE_BYTES - 8]
        found += payload + struct.pack("<Q", _native.crc64(payload + struct.pack("<Q", number)))
    return found


def checksums(process: int, content: bytes | bytearray) -> bytes:
    """Numbers that tell the blocks of every process apart."""
    count = -(-len(content) // tables.BLOCK_BYTES)
    return np.arange(1 + 1000 * process, 1 + 1000 * process + count).astype("<u8").tobytes()


def follow(words: np.ndarray[Any, Any], files: Sequence[bytes], memory: bytearray) -> None:
    """Does what the engine does with the records of `start_read`."""
    rest = words.tolist()
    while rest:
        file, begin, item_bytes, ndim = rest[:4]
        parts = [rest[4 + ndim * part : 4 + ndim * (part + 1)] for part in range(3)]
        address, strides = rest[4 + 3 * ndim], rest[5 + 3 * ndim : 5 + 4 * ndim]
        del rest[: 5 + 4 * ndim]
        item = np.dtype(f"V{item_bytes}")
        chunk = np.frombuffer(files[file], item, math.prod(parts[0]), begin).reshape(parts[0])
        place = np.ndarray(parts[2], item, memory, address, strides)
        place[...] = chunk[grid.slices_of_box((tuple(parts[1]), tuple(parts[2])))]


def expand(decoded: tables.Tables, array: int) -> np.ndarray[Any, Any]:
    """`CHUNK_ENTRY` of every chunk of an array, in order, as if none were in a run."""
    entry = decoded.arrays[array]
    if entry["kind"] != tables.RUNS:
        first = int(entry["first_chunk"])
        listed: np.ndarray[Any, Any] = decoded.chunks[first : first + int(entry["chunk_count"])]
        return listed
    chunks = grid.ChunkGrid(decoded.array_shape(array), decoded.chunk_shape(array))
    numbers = np.arange(chunks.chunk_count)
    lengths = chunks.volumes(numbers) * int(entry["item_bits"]) // 8
    made = np.zeros(len(numbers), tables.CHUNK_ENTRY)
    made["file"], made["offset"] = places.find_places(decoded, np.full(len(numbers), array), numbers, lengths)
    made["length"] = lengths
    return made
