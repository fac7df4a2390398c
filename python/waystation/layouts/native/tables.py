"""The binary tables as NumPy arrays: files, chunks, checksums.

The engine pages and checksums them (`docs/format.md`); here they get names. A section is an array of all its
entries, or behaves like one and reads the pages that it is asked for (`paged.py`). Integers are
little-endian on disk and in these arrays. Reserved fields are zero in every entry: the engine refuses others
as Unsupported. Where the chunks of an array lie is found in `places.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from waystation import _native, grid, storage
from waystation._errors import Corrupt
from waystation.layouts.native.paged import PagedSection, PagedTable

BLOCK_BYTES: int = _native.BLOCK_BYTES

_DIMENSION_LIMIT = 65

# How the chunks of an array are arranged.
REGULAR = 0
IRREGULAR = 1
RUNS = 2
PARTIAL = 3

FILE_ENTRY = np.dtype(
    [
        ("process", "<u4"),
        ("sequence", "<u4"),
        ("location", "<u4"),
        ("flags", "<u4"),
        ("file_bytes", "<u8"),
        ("data_start", "<u8"),
        ("first_block", "<u8"),
        ("reserved", "<u8"),
        ("strong_hash", "V16"),
    ]
)
ARRAY_ENTRY = np.dtype(
    [
        ("kind", "<u4"),
        ("ndim", "<u4"),
        ("item_bits", "<u4"),
        ("reserved", "<u4"),
        ("first_chunk", "<u8"),
        ("chunk_count", "<u8"),
        ("first_dim", "<u8"),
        ("dim_count", "<u8"),
    ]
)
CHUNK_ENTRY = np.dtype([("file", "<u4"), ("codec", "<u4"), ("offset", "<u8"), ("length", "<u8")])

WORD = np.dtype("<u8")

Table = npt.NDArray[Any]


class Entries(Protocol):
    """The entries of a section: an array, or what reads its pages as they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def tobytes(self) -> bytes:
        """All of them."""
        ...


def first_blocks(file_bytes: Table) -> Table:
    """For each file the number of its first block, given their lengths in table order."""
    blocks = -(-file_bytes.astype(np.int64) // BLOCK_BYTES)
    return np.cumsum(blocks) - blocks


@dataclass(slots=True)
class Tables:
    """The three tables of one checkpointable.

    Attributes:
        files: `FILE_ENTRY` per data file.
        arrays: `ARRAY_ENTRY` per array, indexed by array id.
        chunks: `CHUNK_ENTRY` per chunk that is not in a run.
        dims: uint64 words, see the format.
        checksums: uint64 per block of every file.
    """

    files: Entries
    arrays: Table
    chunks: Entries
    dims: Entries
    checksums: Entries

    def encode_files(self) -> bytes:
        """The bytes of `files.bin`."""
        return _native.encode_table("files", [self.files.tobytes()])

    def encode_chunks(self) -> bytes:
        """The bytes of `chunks.bin`."""
        sections = [self.arrays.tobytes(), self.chunks.tobytes(), self.dims.tobytes()]
        return _native.encode_table("chunks", sections)

    def encode_checksums(self) -> bytes:
        """The bytes of `checksums.bin`."""
        # Of a large job by far the largest table, so it is not copied first.
        return _native.encode_table("checksums", [memoryview(np.asarray(self.checksums))])

    def array_shape(self, array: int) -> tuple[int, ...]:
        """Storage shape of an array."""
        entry = self.arrays[array]
        first = int(entry["first_dim"])
        return tuple(self.dims[first : first + int(entry["ndim"])].tolist())

    def chunk_shape(self, array: int) -> tuple[int, ...]:
        """Storage shape of the chunks of an array with a regular grid, in runs or not."""
        entry = self.arrays[array]
        first = int(entry["first_dim"]) + int(entry["ndim"])
        return tuple(self.dims[first : first + int(entry["ndim"])].tolist())

    def chunk_count(self, array: int) -> int:
        """The number of chunks of an array."""
        entry = self.arrays[array]
        if entry["kind"] != RUNS:
            return int(entry["chunk_count"])
        return grid.ChunkGrid(self.array_shape(array), self.chunk_shape(array)).chunk_count

    @property
    def page_bytes_read(self) -> int:
        """Bytes that have been read so far of tables that are read page by page."""
        sections = (self.files, self.chunks, self.dims, self.checksums)
        read = {section.table for section in sections if isinstance(section, PagedSection)}
        return sum(table.bytes_read for table in read)

    def prefetch_checksums(self, files: Sequence[int]) -> None:
        """Reads the block checksums of these files in one call, where they are read page by page."""
        if isinstance(self.checksums, PagedSection):
            rows = self.files[np.asarray(files, np.int64)]
            begins = rows["first_block"].astype(np.int64)
            counts = -(-rows["file_bytes"].astype(np.int64) // BLOCK_BYTES)
            self.checksums.prefetch(begins, begins + counts)

    def file_checksums(self, file: int) -> memoryview:
        """The block checksums of one file."""
        entry = self.files[file]
        first = int(entry["first_block"])
        count = -(-int(entry["file_bytes"]) // BLOCK_BYTES)
        return memoryview(np.ascontiguousarray(self.checksums[first : first + count]))


def decode(files: bytes, chunks: bytes, checksums: bytes, paths: tuple[str, str, str]) -> Tables:
    """Verifies and reads the three tables; `paths` name them in errors."""
    (file_section,) = _native.decode_table("files", files, paths[0])
    array_section, chunk_section, dim_section = _native.decode_table("chunks", chunks, paths[1])
    (checksum_section,) = _native.decode_table("checksums", checksums, paths[2])
    tables = Tables(
        np.frombuffer(file_section, FILE_ENTRY),
        np.frombuffer(array_section, ARRAY_ENTRY),
        np.frombuffer(chunk_section, CHUNK_ENTRY),
        np.frombuffer(dim_section, WORD),
        np.frombuffer(checksum_section, WORD),
    )
    _check_together(tables, paths)
    return tables


def _check_together(tables: Tables, paths: tuple[str, str, str]) -> None:
    """What no table can check alone: chunks lie inside the data of their files, blocks are all there."""
    files, chunks = tables.files, tables.chunks
    blocks = -(-files["file_bytes"].astype(np.int64) // BLOCK_BYTES)
    if int(blocks.sum()) != len(tables.checksums):
        raise Corrupt(
            f"{len(tables.checksums)} block checksums for files of {int(blocks.sum())} blocks", path=paths[2]
        )
    if len(chunks) == 0:
        return
    if int(chunks["file"].max()) >= len(files):
        raise Corrupt("a chunk names a file that is not in the file table", path=paths[1])
    owner = files[chunks["file"]]
    room = owner["file_bytes"] - np.minimum(chunks["offset"], owner["file_bytes"])
    if np.any(chunks["offset"] < owner["data_start"]) or np.any(chunks["length"] > room):
        worst = int(np.argmax((chunks["offset"] < owner["data_start"]) | (chunks["length"] > room)))
        raise Corrupt(f"chunk {worst} lies outside of its file", path=paths[1])


def open_paged(
    paths: tuple[str, str, str], sizes: tuple[int, int, int], root: storage.Root | None = None
) -> Tables:
    """The three tables, of `sizes` bytes, to be read page by page (beneath `root`); only the array entries
    are read now.

    What must be true between entries is not checked for the tables as a whole, but where they are used.
    """
    files = PagedTable(paths[0], "files", sizes[0], root)
    chunks = PagedTable(paths[1], "chunks", sizes[1], root)
    checksums = PagedTable(paths[2], "checksums", sizes[2], root)
    arrays: Table = chunks.section(0, ARRAY_ENTRY)[:]
    tables = Tables(
        files.section(0, FILE_ENTRY),
        arrays,
        chunks.section(1, CHUNK_ENTRY),
        chunks.section(2, WORD),
        checksums.section(0, WORD),
    )
    _check_arrays(tables, paths[1])
    return tables


def _check_arrays(tables: Tables, path: str) -> None:
    """What a reader relies on who has the array entries only: that they stay inside the other sections."""
    arrays = tables.arrays
    names = ("kind", "ndim", "first_chunk", "chunk_count", "first_dim", "dim_count")
    kind, ndim, first_chunk, chunk_count, first_dim, dim_count = (
        arrays[name].astype(float) for name in names
    )
    is_boxes = (kind == IRREGULAR) | (kind == PARTIAL)
    box_words = 2 * (chunk_count + np.ceil(chunk_count / grid.GROUP_BOXES)) + 1
    words = ndim * np.where(is_boxes, box_words, 2)
    wrong = (first_chunk + chunk_count > len(tables.chunks)) | (first_dim + dim_count > len(tables.dims))
    wrong |= (ndim > _DIMENSION_LIMIT) | np.where(kind == RUNS, dim_count <= words, dim_count != words)
    if wrong.any():
        raise Corrupt(f"array {int(np.argmax(wrong))} does not fit the sections of its table", path=path)
