"""The stages of a save and a load of a large job, each measured in a fresh process of its own.

`python -m benchmarks.scale_stages STAGE PROCESSES DIRECTORY` prints what it has measured as JSON. All stages
work in one directory, in this order:

- `write-parts`: what every process says, one file each; no part of the measurement.
- `merge`: what the primary does with them until the tables are written.
- `plan`: what one process does before its first byte of data is read: as many processes as have saved load,
  or half as many, whose boxes are two chunks each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.scale_job import ITEM_BYTES, Job
from waystation import _native, grid
from waystation.frameworks import dtypes
from waystation.layouts.native import boxes, merge, names, read, tables, tree_file
from waystation.layouts.native.parts import Part
from waystation.layouts.native.records import CheckpointableRecord, Digest
from waystation.layouts.opened import Request

_BATCH = 4096
_LIMIT_BYTES = 16 << 30
TABLES = (names.FILE_TABLE, names.CHUNK_TABLE, names.CHECKSUM_TABLE)


def write_parts(job: Job, directory: Path) -> dict[str, Any]:
    """Writes the part of every process."""
    job.check([0, 1, job.processes // 2, job.processes - 1])
    directory.mkdir(parents=True, exist_ok=True)
    part_bytes = 0
    batch: list[tuple[str, bytes]] = []
    for process, part in enumerate(job.parts()):
        content = part.encode()
        part_bytes += len(content)
        batch.append((str(part_path(directory, process)), content))
        if len(batch) == _BATCH or process == job.processes - 1:
            _native.write_small_files(batch, sync=False)
            batch = []
    return {"part_bytes": part_bytes, "state_bytes": job.state_bytes}


def part_path(directory: Path, process: int) -> Path:
    return directory / f"p{process:05}.part"


def merge_parts(job: Job, directory: Path) -> dict[str, Any]:
    """Reads and merges the parts and writes the tables, as the primary does."""
    for name in (*TABLES, names.TREE, names.CHECKPOINTABLE_RECORD):
        (directory / name).unlink(missing_ok=True)
    paths = [str(part_path(directory, process)) for process in range(job.processes)]
    measure.give_back_free_memory()
    before = measure.memory()["resident"]
    measure.reset_peak()
    seconds: dict[str, float] = {}
    contents = _timed(seconds, "read", lambda: _native.read_small_files(paths, limit_bytes=_LIMIT_BYTES))
    parts = _timed(seconds, "decode", lambda: [_decode(content) for content in contents])
    merged = _timed(seconds, "merge", lambda: merge.merge(parts, job.sources, job.labels))
    files = _timed(seconds, "encode", lambda: _encode(merged, job))
    record = CheckpointableRecord(job.processes, {name: Digest.of(data) for name, data in files.items()})
    files[names.CHECKPOINTABLE_RECORD] = record.encode()
    written = [(str(directory / name), data) for name, data in files.items()]
    _timed(seconds, "write", lambda: _native.write_small_files(written, sync=True))
    return {
        "seconds": seconds,
        "peak_bytes": measure.memory()["peak"] - before,
        "table_bytes": {name: len(data) for name, data in files.items()},
        "arrays_in_runs": int(np.count_nonzero(merged.arrays["kind"] == tables.RUNS)),
        "chunk_entries": len(merged.chunks),
        "chunks": sum(merged.chunk_count(array) for array in range(len(job.sources))),
    }


def _decode(content: bytes) -> Part:
    Digest.of(content)  # what a save compares with the digest that the process has sent
    return Part.decode(content)


def _encode(merged: tables.Tables, job: Job) -> dict[str, bytes]:
    return {
        names.TREE: tree_file.encode(job.tree_file()),
        names.FILE_TABLE: merged.encode_files(),
        names.CHUNK_TABLE: merged.encode_chunks(),
        names.CHECKSUM_TABLE: merged.encode_checksums(),
    }


def plan_load(job: Job, directory: Path, processes: int, *, cold: bool) -> dict[str, Any]:
    """Opens the tables and plans the load of one of so many processes, as every one of them does."""
    process = processes // 2 + 1
    wanted = job.boxes(process, processes)
    requests = [Request(array, [box]) for array, box in enumerate(wanted)]
    forms = [dtypes.of_stored(source) for source in job.sources]
    sizes = [grid.volume(box) * ITEM_BYTES for box in wanted]
    addresses = (np.cumsum(sizes) - sizes).tolist()
    digest = Digest.of((directory / names.CHECKPOINTABLE_RECORD).read_bytes())
    if cold:
        for name in (*TABLES, names.TREE, names.CHECKPOINTABLE_RECORD):
            _drop(directory / name)
    measure.give_back_free_memory()
    before = measure.memory()["resident"]
    measure.reset_peak()
    seconds: dict[str, float] = {}

    def open_all() -> read.OpenCheckpointable:
        return read.decode_checkpointable(read.read_files(str(directory), digest))

    opened = _timed(seconds, "open", open_all)

    def plan() -> tuple[int, int]:
        arguments = (requests, forms, addresses, sizes, opened.tree.arrays, opened.tree.labels)
        words, used = boxes.read_words(opened.tables, *arguments)
        return len(words), len(read.files_to_read(opened, used, with_checksums=True))

    _, used_files = _timed(seconds, "plan", plan)
    stored_bytes = sum((directory / name).stat().st_size for name in TABLES)
    return {
        "seconds": seconds,
        "peak_bytes": measure.memory()["peak"] - before,
        "is_paged": opened.tables.page_bytes_read > 0,
        "table_bytes_read": opened.tables.page_bytes_read or stored_bytes,
        "files": used_files,
    }


def _drop(path: Path) -> None:
    """Takes a file out of the page cache; it has been synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _timed(seconds: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    found = call()
    seconds[name] = time.perf_counter() - begin
    return found


def main() -> None:
    stage, count, path = sys.argv[1:]
    job, directory = Job(int(count)), Path(path)
    if stage == "write-parts":
        found = write_parts(job, directory)
    elif stage == "merge":
        found = merge_parts(job, directory)
    elif stage in PLANS:
        divisor, cold = PLANS[stage]
        found = plan_load(job, directory, job.processes // divisor, cold=cold)
    else:
        raise SystemExit(f"there is no stage {stage!r}")
    print(json.dumps(found))


# How many processes have saved for each that loads, and whether the tables are out of the page cache.
PLANS = {
    "plan-cold": (1, True),
    "plan": (1, False),
    "plan-half-cold": (2, True),
    "plan-half": (2, False),
}

if __name__ == "__main__":
    main()
