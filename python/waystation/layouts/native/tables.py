"""The binary tables as NumPy arrays: files, chunks, checksums.

The engine pages and checksums them (`docs/format.md`); here they get names and the arithmetic to
find the chunks of an array. Integers are little-endian on disk and in these arrays. Reserved fields
are zero in every table that was decoded: the engine refuses others as Unsupported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from waystation import _native
from waystation._errors import Corrupt

BLOCK_BYTES: int = _native.BLOCK_BYTES

REGULAR = 0
IRREGULAR = 1

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

Table = npt.NDArray[Any]


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
        chunks: `CHUNK_ENTRY` per chunk.
        dims: uint64 words, see the format.
        checksums: uint64 per block of every file.
    """

    files: Table
    arrays: Table
    chunks: Table
    dims: Table
    checksums: Table

    def encode_files(self) -> bytes:
        """The bytes of `files.bin`."""
        return _native.encode_table("files", [self.files.tobytes()])

    def encode_chunks(self) -> bytes:
        """The bytes of `chunks.bin`."""
        sections = [self.arrays.tobytes(), self.chunks.tobytes(), self.dims.tobytes()]
        return _native.encode_table("chunks", sections)

    def encode_checksums(self) -> bytes:
        """The bytes of `checksums.bin`."""
        return _native.encode_table("checksums", [self.checksums.tobytes()])

    def array_shape(self, array: int) -> tuple[int, ...]:
        """Storage shape of an array."""
        entry = self.arrays[array]
        first = int(entry["first_dim"])
        return tuple(self.dims[first : first + int(entry["ndim"])].tolist())

    def chunk_shape(self, array: int) -> tuple[int, ...]:
        """Storage shape of the chunks of an array with a regular grid."""
        entry = self.arrays[array]
        first = int(entry["first_dim"]) + int(entry["ndim"])
        return tuple(self.dims[first : first + int(entry["ndim"])].tolist())

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
        np.frombuffer(dim_section, "<u8"),
        np.frombuffer(checksum_section, "<u8"),
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
