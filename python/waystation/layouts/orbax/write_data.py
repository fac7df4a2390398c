"""Writes the chunks of one process in one of Orbax's layouts, through the engine.

Chunks that are stored as they are go out in one job, as in our own layout. Those that are compressed go
batch after batch: while the engine writes the frames of one, the next is compressed, so that memory is taken
for two of them and no more. Invariants: a failed or cancelled save leaves no job behind; files are durable in
the end, but for those that are said not to be; what is reported of chunks is where they are.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from waystation import _native, _plans
from waystation._options import Options
from waystation.frameworks.base import Block
from waystation.layouts.native import engine_job, write_plan
from waystation.layouts.native.blocks import copied_to_host
from waystation.layouts.native.write import SYNC_TOGETHER_BYTES, Observer
from waystation.layouts.orbax import names
from waystation.layouts.orbax.checksums import SummedFile
from waystation.layouts.orbax.frame_limits import FrameLimits
from waystation.layouts.orbax.write_ocdbt import DataFile, new_data_file
from waystation.layouts.orbax.write_parts import Part
from waystation.layouts.orbax.write_plan import Arrays, Planned, Value

_BATCH_VALUES = 4096
_SUMMED_BYTES = 1 << 30  # between two heartbeats
_MOST_SYNCED_FILES = 128


@dataclass(slots=True)
class Prepared:
    """A checkpointable whose arrays are ready to be written.

    Attributes:
        name: Of the checkpointable.
        arrays: Its arrays.
        planned: Where their chunks go; None where they are compressed, and that comes out only then.
        waited_for: Where in the files of the plan memory is that the caller waits for.
        is_waited_for: Whether the caller waits for any memory.
    """

    name: str
    arrays: Arrays
    planned: Planned | None
    waited_for: list[tuple[int, int]]
    is_waited_for: bool


def write(
    attempt_path: str,
    prepared: Sequence[Prepared],
    process: int,
    options: Options,
    limits: FrameLimits,
    observer: Observer,
    is_cancelled: Callable[[], bool],
    group: _native.SyncGroup | None,
) -> list[Part]:
    """Writes what this process has of states, all of one kind.

    Args:
        attempt_path: The directory of the attempt, with one for each state and array.
        prepared: The states.
        process: This one.
        options: Of the save.
        limits: Of what is compressed.
        observer: What it reports to.
        is_cancelled: Whether to stop between batches.
        group: Gets the files that are not durable yet; None in a store.

    Returns:
        Of each state what has been written where.
    """
    data_bytes = sum(value.chunk.nbytes for entry in prepared for value in entry.arrays.values)
    if observer.alone and group is not None:
        engine_job.calibrate_once(attempt_path, options, data_bytes)
    # What is many files, or little, is made durable together in the end.
    is_small = data_bytes <= SYNC_TOGETHER_BYTES or _file_count(prepared) > _MOST_SYNCED_FILES
    writing = _Writing(attempt_path, options, observer, group if is_small else None)
    if all(entry.planned is not None for entry in prepared):
        return writing.write_plans(prepared)
    return writing.write_frames(prepared, process, limits, is_cancelled)


def _file_count(prepared: Sequence[Prepared]) -> int:
    """Files that there will be, but for the few of databases whose size comes out only then."""
    return sum(
        len(entry.planned.files)
        if entry.planned is not None
        else 0
        if entry.arrays.storage.use_ocdbt
        else len(entry.arrays.values)
        for entry in prepared
    )


@dataclass(slots=True)
class _Writing:
    path: str
    options: Options
    observer: Observer
    group: _native.SyncGroup | None

    def write_plans(self, prepared: Sequence[Prepared]) -> list[Part]:
        files, first = [], []
        position = 0
        for entry in prepared:
            planned = entry.planned
            assert planned is not None, "the chunks of this state are stored as they are"
            files += [
                (os.path.join(self.path, entry.name, file.name), file.header, file.file_bytes, file.words)
                for file in planned.files
            ]
            first += [(begin + position, end + position) for begin, end in entry.waited_for]
            position += planned.data_bytes
            self._sum(entry.arrays, planned)
        sums = iter(self._run(files, prepared, first))
        parts = []
        for entry in prepared:
            planned = entry.planned
            assert planned is not None, "the chunks of this state are stored as they are"
            written = [SummedFile(file.name, file.file_bytes, next(sums)) for file in planned.files]
            parts.append(Part.of(entry.arrays.values, planned.data_files, planned.places, written))
        return parts

    def _sum(self, arrays: Arrays, planned: Planned) -> None:
        """Fills in the checksums of chunks that are stored as they are. Of memory of devices there are copies
        of one chunk at a time."""
        if not len(planned.checksums):
            return
        begin = 0
        for batch in _batches(arrays.values, _SUMMED_BYTES):
            self.observer.heartbeat()
            is_here = [all(block.device < 0 for block in value.chunk.blocks) for value in batch]
            here = [number for number, is_own in enumerate(is_here) if is_own]
            for group in (here, *([number] for number, is_own in enumerate(is_here) if not is_own)):
                words, owners = _segments([batch[number] for number in group], arrays)
                sums = _native.chunk_checksums(words, owners, threads=self.options.engine.threads)
                planned.checksums[[begin + number for number in group]] = sums
            begin += len(batch)

    def _run(
        self,
        files: Sequence[engine_job.FileRecord],
        prepared: Sequence[Prepared],
        first: Sequence[tuple[int, int]],
    ) -> list[bytes]:
        """Writes the files of plans; returns their block checksums."""
        if not files:
            self.observer.on_copied_out()
            return []
        return engine_job.run(
            files,
            [(entry.arrays, entry.planned) for entry in prepared],
            self.options,
            first,
            self.observer.on_job,
            self.observer.on_copied_out,
            self.observer.heartbeat,
            group=self.group,
        )

    def write_frames(
        self,
        prepared: Sequence[Prepared],
        process: int,
        limits: FrameLimits,
        is_cancelled: Callable[[], bool],
    ) -> list[Part]:
        if not any(entry.is_waited_for for entry in prepared):
            self.observer.on_copied_out()
        jobs = _Jobs(self.observer.heartbeat)
        states = []
        with jobs:
            for entry in prepared:
                frames = _Frames(os.path.join(self.path, entry.name), entry.arrays, process)
                states.append(frames)
                for batch in _batches(entry.arrays.values, limits.batch_bytes):
                    if is_cancelled():
                        break
                    memory, files = frames.compress(batch, limits)
                    jobs.finish()
                    job = engine_job.start(files, memory, self.options, group=self.group)
                    jobs.begin(job, self.observer, frames.note_checksums)
            if any(entry.is_waited_for for entry in prepared):
                self.observer.on_copied_out()
            jobs.finish()
        return [frames.part() for frames in states]


class _Jobs:
    """One job at a time; none is left when an error ends it."""

    def __init__(self, heartbeat: Callable[[], None]) -> None:
        self._heartbeat = heartbeat
        self._job: _native.Job | None = None
        self._on_checksums: Callable[[Sequence[bytes]], None] = lambda _: None

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._job is not None:
            engine_job.stop(self._job)

    def begin(
        self, job: _native.Job, observer: Observer, on_checksums: Callable[[Sequence[bytes]], None]
    ) -> None:
        """Watches a job; in the end `on_checksums` gets the block checksums of its files."""
        self._job, self._on_checksums = job, on_checksums
        observer.on_job(job)

    def finish(self) -> None:
        """Waits for the job, if there is one."""
        if self._job is not None:
            checksums = engine_job.finish(self._job, self._heartbeat)
            self._job = None
            self._on_checksums(checksums)


class _Frames:
    """The chunks of a state on their way through the compressor."""

    def __init__(self, directory: str, arrays: Arrays, process: int) -> None:
        self._directory = directory
        self._arrays = arrays
        self._process = process
        self._values: list[Value] = []
        self._data_files: list[DataFile] = []
        self._written: list[tuple[str, int]] = []  # names and lengths
        self._checksums: list[bytes] = []
        self._places: list[tuple[int, int, int]] = []

    def compress(
        self, batch: Sequence[Value], limits: FrameLimits
    ) -> tuple[object, list[engine_job.FileRecord]]:
        """Compresses values; returns what keeps the frames, and the files that they make."""
        storage = self._arrays.storage
        assert storage.level is not None, "these arrays are to be compressed"
        words, owners = _segments(batch, self._arrays)
        memory, frames = _native.compress_zstd(
            words,
            owners,
            level=storage.level,
            checksum=storage.has_checksums,
            threads=limits.threads(max(value.chunk.nbytes for value in batch)),
        )
        self._values += batch
        return memory, self._files(batch, memory.address, frames)

    def _files(
        self, batch: Sequence[Value], address: int, frames: Sequence[tuple[int, int]]
    ) -> list[engine_job.FileRecord]:
        if not self._arrays.storage.use_ocdbt:
            keys = [self._arrays.key(value.chunk.array, value.number) for value in batch]
            self._places += [(0, 0, nbytes) for _, nbytes in frames]
            return [self._file(key, address, [frame]) for key, frame in zip(keys, frames, strict=True)]
        number = len(self._data_files)
        self._data_files.append(new_data_file(names.ocdbt_process(self._process) + "/"))
        end = 0
        for _, nbytes in frames:
            self._places.append((number, end, nbytes))
            end += nbytes
        return [self._file("".join(self._data_files[-1]), address, frames)]

    def _file(self, name: str, address: int, frames: Sequence[tuple[int, int]]) -> engine_job.FileRecord:
        lengths = [nbytes for _, nbytes in frames]
        words = _plans.byte_segments(0, lengths, [address + offset for offset, _ in frames])
        self._written.append((name, sum(lengths)))
        return os.path.join(self._directory, name), b"", sum(lengths), words

    def note_checksums(self, checksums: Sequence[bytes]) -> None:
        """Takes the block checksums of the next files that have been written."""
        self._checksums += checksums

    def part(self) -> Part:
        """What has been written where."""
        places = np.array(self._places, np.int64).reshape(-1, 3)
        files = [
            SummedFile(*file, checksums)
            for file, checksums in zip(self._written, self._checksums, strict=True)
        ]
        return Part.of(self._values, self._data_files, places, files)


def _batches(values: Sequence[Value], most_bytes: int) -> Iterator[Sequence[Value]]:
    """Values in batches of up to so many bytes, at least one value each."""
    start = held = 0
    for number, value in enumerate(values):
        if number > start and (held + value.chunk.nbytes > most_bytes or number - start == _BATCH_VALUES):
            yield values[start:number]
            start, held = number, 0
        held += value.chunk.nbytes
    if values:
        yield values[start:]


def _segments(values: Sequence[Value], arrays: Arrays) -> tuple[NDArray[np.int64], object]:
    """Records of the engine of what chunks hold, with copies of what is in the memory of devices; and what
    keeps it alive."""
    words: list[int] = []
    owners: list[object] = []
    for value in values:
        item_bytes = arrays.sources[value.chunk.array].storage_item_bytes
        chunk = dataclasses.replace(value.chunk, blocks=_on_host(value.chunk.blocks, item_bytes))
        words += write_plan.segment_words(0, chunk, item_bytes)
        owners.append(chunk)
    return np.asarray(words, np.int64), owners


def _on_host(blocks: list[Block], item_bytes: int) -> list[Block]:
    """The blocks, with copies in place of those in the memory of devices."""
    if all(block.device < 0 for block in blocks):
        return blocks
    return [block if block.device < 0 else copied_to_host(block, item_bytes) for block in blocks]
