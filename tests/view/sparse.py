"""Checkpoints of any size that take no room: all files and tables that a save would write, over zeros that no
disk holds. The real planner plans, the real code writes the metadata; data files are only cut to length."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from waystation import _native, tree
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import names, tables
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.merge import Part
from waystation.layouts.native.records import CheckpointRecord, Digest
from waystation.layouts.native.write import Prepared, metadata_files
from waystation.layouts.native.write_plan import PlannedFile, plan
from waystation.layouts.opened import ArrayLeaf, StoredTree

_ITEM_BYTES = 4
_FILE_BYTES = 16 << 30


def write(path: Path, shapes: list[tuple[int, ...]]) -> int:
    """Writes a checkpoint of float32 arrays in `layers`, a list; returns the bytes of its data files."""
    _, structure = tree.flatten({"layers": [{"w": 0} for _ in shapes], "step": 0})
    sources = [
        ArraySource(shape, "float32", "numpy", "F32", shape, storage_item_bytes=4, blocks=[], mutable=False)
        for shape in shapes
    ]
    leaves: list[object] = [ArrayLeaf(number) for number in range(len(shapes))]
    labels = [f"layers.{number}.w" for number in range(len(shapes))]
    stored = StoredTree(structure, [*leaves, 1200], sources, labels)  # type: ignore[list-item]
    chunks = [
        Chunk(number, None, shape, int(np.prod(shape)) * _ITEM_BYTES, [])
        for number, shape in enumerate(shapes)
    ]
    planned = plan(chunks, sources, labels, _FILE_BYTES)
    directory = path / "state"
    directory.mkdir(parents=True)
    sums = [_write_data(directory, file) for file in planned.files]
    part = Part.of(planned, chunks, planned.checksums(sums))
    files = metadata_files(Prepared("state", stored, sources, chunks, planned), [part], partial=False)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    digest = Digest.of(files[names.CHECKPOINTABLE_RECORD])
    record = CheckpointRecord(1, {"state": ("state", digest)}, time.time_ns())
    (path / names.RECORD).write_bytes(record.encode())
    return sum(file.file_bytes for file in planned.files)


def _write_data(directory: Path, file: PlannedFile) -> bytes:
    """Writes the header of a data file and cuts it to its length; returns the checksums of its blocks."""
    with (directory / file.name).open("wb") as written:
        written.write(file.header)
        written.truncate(file.file_bytes)
    block = tables.BLOCK_BYTES
    count = -(-file.file_bytes // block)
    sums = np.full(count, _native.crc64(bytes(block)), "<u8")
    with (directory / file.name).open("rb") as read:
        for number in range(-(-len(file.header) // block)):
            sums[number] = _native.crc64(read.read(block))
        read.seek((count - 1) * block)
        sums[-1] = _native.crc64(read.read(block))
    return sums.tobytes()
