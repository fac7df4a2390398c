"""`spread`: the tensors of a model as files on several disks, in one folder that any tool loads.

Tensors are dealt out whole, by bytes, to the disk that has least so far, the largest first: no way to deal
them out is much better. Their bytes are copied as they are, by a job of the engine for each disk, all at
once, so that every disk is written from the start. Everything that can be refused is refused before a byte
is written; `spread_folders.py` says how the files come to stand in their folders.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from waystation import _native, storage
from waystation._arguments import require_function
from waystation._errors import Cancelled, Corrupt, InvalidInput, Unsupported, WaystationError, WrongType
from waystation._options import Options, checks
from waystation._options.in_effect import current_options
from waystation._threads import Threads
from waystation.layouts.native import engine_job, read_job
from waystation.safetensors.checksums import (
    FILE_NAME,
    FileChecksums,
    OnProgress,
    blocks_of,
    checksums_of,
    sum_files,
    write_file,
)
from waystation.safetensors.destination import alignment_rank
from waystation.safetensors.headers import Header, check_unchanged, read_headers
from waystation.safetensors.index import SUFFIX, encode_index, read_metadata
from waystation.safetensors.save import FILE_BYTES
from waystation.safetensors.sources import Files, PathLike, find, resolve
from waystation.safetensors.spread_folders import STEM, Folders, Placed, Stages
from waystation.safetensors.spread_note import NOTE
from waystation.storage import disks

# Files beside a model of up to this size are carried along. What is larger is other weights, nearly always.
CARRIED_BYTES = 64 << 20

_HEADER_ALIGN_BYTES = 4096
# Beside the files themselves: directories, index, note.
_SPARE_BYTES = 1 << 20
_READERS = 4
# Memory of all jobs for what has been read, and again for what is being written.
_STAGING_BYTES = 256 << 20
_MOST_STAGING_BYTES = 128 << 20  # of one
_TICK_S = 0.1

_log = logging.getLogger("waystation")


@dataclass(frozen=True, slots=True)
class SpreadFile:
    """A file of a model that was spread.

    Attributes:
        path: In the folder that is the model; a symbolic link, if the file is in another.
        folder: The folder that holds it.
        nbytes: Its length.
        tensors: How many tensors are in it.
    """

    path: str
    folder: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class SpreadModel:
    """What `spread` has made.

    Attributes:
        path: The folder that is the model: what `load` and other tools take.
        files: Its files of tensors, in the order of their names.
        nbytes: Bytes of all tensors.
        carried: Paths of other files that were copied with it, from its folder.
        left_out: Paths of files beside the model that were not.
        on_one_disk: Pairs of folders that are on one disk.
    """

    path: str
    files: list[SpreadFile]
    nbytes: int
    carried: list[str]
    left_out: list[str]
    on_one_disk: list[tuple[str, str]]


def spread(
    files: Files,
    to: Sequence[PathLike],
    *,
    max_file_bytes: int = FILE_BYTES,
    overwrite: bool = False,
    relative_links: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
) -> SpreadModel:
    """Spreads a published model over several disks, so that a load reads all of them at the same time.

    The first folder becomes the model: an index, its share of the files, and a symbolic link to each file in
    another folder. `load`, and any tool that opens such a directory, takes it. Each file is an ordinary
    safetensors file. Tensors are dealt out whole, so that every disk gets about the same number of bytes.
    Their bytes, dtypes, shapes and names stay, and so does the text for people: a file holds only tensors
    whose files had the same. What is written is read again from the disks and compared before the model
    appears, at once and durable. One process calls this, also in a program of several. The given model stays
    as it is.

    Args:
        files: A file, several files, an index, or a directory that holds one of these, as for `open`; also in
            an object store. Of a directory, or its index, other files of up to 64 MiB are copied with
            the model, such as its configuration and tokenizer. If it has checksums, they are verified, and
            the new files get theirs.
        to: Two folders or more, one on each disk. The first must not exist yet, or be empty. The others may
            hold other files. What a folder is to be in must exist: a disk that is not mounted is an error.
        max_file_bytes: Most bytes of tensors in one file (a larger tensor has its own).
        overwrite: Replace a model that was spread to the first folder before. A reader finds the earlier one
            or the new one, whole; both need room at a time.
        relative_links: Make links relative to the first folder, for disks that other machines or containers
            mount elsewhere together. By default links are absolute, so that the first folder can be moved.
        on_progress: Called with the bytes that were written or compared so far, and those of both in all.

    Returns:
        Where the model is, and what is where.

    Raises:
        NotFound, InvalidInput, Corrupt: As `open` does for the model; or a folder cannot be one. Nothing was
            written.
        Conflict: A folder holds something that is in the way, or the model changed meanwhile.
        DiskFull: A disk has too little room. That is told before anything is written, if it is so then.
        Corrupt: What was read is not what the model's checksums say, or a disk has not kept what was written.
        Unsupported: The model's files are in several stores.
    """
    return spread_model(
        files,
        to,
        max_file_bytes=max_file_bytes,
        overwrite=overwrite,
        relative_links=relative_links,
        on_progress=on_progress,
        on_warning=lambda text: _log.warning("%s", text),
    )


def spread_model(
    files: Files,
    to: Sequence[PathLike],
    *,
    max_file_bytes: int,
    overwrite: bool,
    relative_links: bool,
    on_progress: OnProgress,
    on_warning: Callable[[str], object],
) -> SpreadModel:
    """What `spread` does; warnings, which come before anything is written, go to a function."""
    paths = _checked(to, max_file_bytes, overwrite, relative_links, on_progress)
    source = _Source.opened(files)
    folders = Folders(paths, overwrite=overwrite, relative_links=relative_links)
    if source.is_local:
        folders.check_source([header.path for header in source.headers], source.directory)
    planned = plan(source.headers, len(paths), max_file_bytes)
    carried, left_out = source.beside()
    used = sorted({0, *(file.folder for file in planned)})
    on_one_disk = folders.on_one_disk(used)
    for first, second in on_one_disk:
        on_warning(f"'{first}' and '{second}' are on one disk, so they are not read faster than one of them")
    needed = dict.fromkeys(used, _SPARE_BYTES)
    for file in planned:
        needed[file.folder] += file.nbytes
    needed[0] += sum(carried.values())
    folders.check_room(needed)
    with folders.staged(used) as stages:
        names, written = _write(source, planned, carried, stages, on_progress)
    return SpreadModel(
        folders.place,
        [
            SpreadFile(
                os.path.join(folders.place, name), folders.paths[file.folder], file.nbytes, len(file.tensors)
            )
            for name, file in zip(names, written, strict=True)
        ],
        sum(file.tensor_bytes for file in written),
        sorted(carried),
        left_out,
        on_one_disk,
    )


def _checked(
    to: Sequence[PathLike],
    max_file_bytes: int,
    overwrite: bool,
    relative_links: bool,
    on_progress: OnProgress,
) -> list[str]:
    """The folders as absolute paths, once all arguments are what they should be."""
    problem = checks.positive(max_file_bytes)
    if problem is not None:
        raise InvalidInput(f"max_file_bytes is {max_file_bytes!r}; give {problem}")
    for name, value in (("overwrite", overwrite), ("relative_links", relative_links)):
        if not isinstance(value, bool):
            raise WrongType(f"{name} must be True or False, not {value!r:.60}")
    require_function("on_progress", on_progress)
    if isinstance(to, str | os.PathLike) or not isinstance(to, Sequence):
        raise WrongType(
            f"to must be several folders, such as ['/disk1/model', '/disk2/model'], not {to!r:.60}"
        )
    if len(to) < 2:
        raise InvalidInput(
            f"a model is spread over two folders or more, and {len(to) or 'none'} was given; give one on "
            "each disk"
        )
    return [storage.absolute(path) for path in to]


# ---- what is spread ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """The model that is spread.

    Attributes:
        headers: Of its files.
        directory: Where they are, if a directory or its index was given.
        metadata: What its index says of the whole model.
    """

    headers: list[Header]
    directory: str | None
    metadata: Mapping[str, Any]

    @classmethod
    def opened(cls, files: Files) -> _Source:
        """Opens and checks a model."""
        headers = find(files)
        if len({id(header.source.engine) for header in headers}) > 1:
            raise Unsupported(
                "the model's files are in several stores, or in one and on this machine; copy them to one "
                "place first",
                path=headers[0].path,
            )
        if not isinstance(files, str | os.PathLike):
            return cls(headers, None, {})
        given, index = resolve(files)
        is_directory = index is not None or storage.located(files) != given[0]
        directory = os.path.dirname(given[0]) if is_directory else None
        return cls(headers, directory, {} if index is None else read_metadata(index.path))

    @property
    def is_local(self) -> bool:
        """Whether it is on a file system of this machine."""
        return all(header.source.engine is None for header in self.headers)

    def beside(self) -> tuple[dict[str, int], list[str]]:
        """Files beside the model with their lengths, by their paths from its directory: those that are
        carried along; and the paths of others. Hidden ones are neither."""
        if self.directory is None or not storage.of(self.directory).is_listable:
            return {}, []
        own = {os.path.basename(header.path) for header in self.headers}
        carried, left_out = {}, []
        for path, nbytes in sorted(storage.files_below(self.directory).items()):
            if any(name.startswith(".") for name in path.split(os.sep)) or path in own | {FILE_NAME, NOTE}:
                continue
            is_of_models = os.sep not in path and path.endswith((".safetensors", SUFFIX))
            if path.endswith(SUFFIX) and is_of_models:
                continue
            is_plain = storage.is_file(os.path.join(self.directory, path))
            if is_of_models or nbytes > CARRIED_BYTES or not is_plain:
                left_out.append(path)
            else:
                carried[path] = nbytes
        return carried, left_out


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor, and where it is.

    Attributes:
        label: Its name.
        dtype: As the header has it.
        shape: The same.
        nbytes: Bytes of its elements.
        file: The number of its file.
        begin: Where in that it begins.
    """

    label: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: int
    begin: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; 1 if it has less."""
        return max(1, self.nbytes // max(1, math.prod(self.shape)))


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A file that is to be written.

    Attributes:
        folder: The number of its folder.
        header: Its first bytes.
        tensors: What follows, in order.
    """

    folder: int
    header: bytes
    tensors: list[_Tensor]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.header) + self.tensor_bytes

    def extents(self) -> list[int]:
        """What follows the header, as `_native.start_copy` takes it."""
        words: list[int] = []
        end = (-1, -1)
        for tensor in self.tensors:
            if tensor.nbytes and end == (tensor.file, tensor.begin):
                words[-1] += tensor.nbytes
            elif tensor.nbytes:
                words += [tensor.file, tensor.begin, tensor.nbytes]
            if tensor.nbytes:
                end = (tensor.file, tensor.begin + tensor.nbytes)
        return words


def plan(headers: Sequence[Header], folders: int, max_file_bytes: int) -> list[PlannedPart]:
    """Deals the tensors of a model out to so many folders, and to files there.

    Files that follow each other are in different folders, as far as that goes, for readers that take them in
    order. The first is in the first folder.
    """
    tensors = [
        _Tensor(name, dtype, shape, end - begin, number, begin)
        for number, header in enumerate(headers)
        for name, dtype, shape, begin, end in header.tensors
    ]
    texts: list[dict[str, str] | None] = []  # of equal files once
    kinds = []
    for header in headers:
        if header.metadata not in texts:
            texts.append(header.metadata)
        kinds.append(texts.index(header.metadata))
    columns: list[list[PlannedPart]] = []
    for folder, own in enumerate(_dealt(tensors, folders)):
        columns.append([])
        for kind in sorted({kinds[tensor.file] for tensor in own}):
            of_kind = [tensor for tensor in own if kinds[tensor.file] == kind]
            columns[-1] += [_part(folder, texts[kind], cut) for cut in _cut(of_kind, max_file_bytes)]
    if not tensors:
        columns[0].append(_part(0, texts[0], []))
    rounds = max(map(len, columns))
    return [column[place] for place in range(rounds) for column in columns if place < len(column)]


def _dealt(tensors: Sequence[_Tensor], count: int) -> list[list[_Tensor]]:
    """The tensors of each of so many folders, in their order."""
    held = [(0, folder) for folder in range(count)]
    folder_of = [0] * len(tensors)
    for number in sorted(range(len(tensors)), key=lambda number: -tensors[number].nbytes):
        nbytes, folder = held[0]
        folder_of[number] = folder
        heapq.heapreplace(held, (nbytes + tensors[number].nbytes, folder))
    dealt: list[list[_Tensor]] = [[] for _ in range(count)]
    for tensor, folder in zip(tensors, folder_of, strict=True):
        dealt[folder].append(tensor)
    return dealt


def _cut(tensors: Sequence[_Tensor], max_file_bytes: int) -> list[list[_Tensor]]:
    """Tensors for files, each full before the next is begun."""
    files: list[list[_Tensor]] = []
    held = 0
    for tensor in tensors:
        if not files or held + tensor.nbytes > max_file_bytes:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += tensor.nbytes
    return files


def _part(folder: int, metadata: dict[str, str] | None, tensors: Sequence[_Tensor]) -> PlannedPart:
    ordered = sorted(tensors, key=alignment_rank)
    described = [(tensor.label, tensor.dtype, tensor.shape) for tensor in ordered]
    header = _native.build_safetensors_header(described, metadata, _HEADER_ALIGN_BYTES)
    return PlannedPart(folder, header, ordered)


# ---- writing -----------------------------------------------------------------------------------


def _write(
    source: _Source,
    planned: Sequence[PlannedPart],
    carried: Mapping[str, int],
    stages: Stages,
    on_progress: OnProgress,
) -> tuple[list[str], Sequence[PlannedPart]]:
    """Writes, compares and commits everything; returns the names of the files."""
    placed = [
        Placed(file.folder, os.path.join(stages.paths[file.folder], f"{STEM}-{number:05}.part"))
        for number, file in enumerate(planned, 1)
    ]
    total = 2 * sum(file.nbytes for file in planned)
    known = checksums_of(source.headers)
    on_progress(0, total)
    copying = _Copying(source, known, current_options(), lambda done: on_progress(done, total))
    checksums = copying.run(planned, placed, stages)
    _carry(source.directory, carried, stages.paths[0])
    check_unchanged(source.headers)
    _compare(placed, checksums, lambda done: on_progress(min(total // 2 + done, total - 1), total))

    def index_of(names: Sequence[str]) -> bytes:
        entries = [
            (name, [tensor.label for tensor in file.tensors])
            for name, file in zip(names, planned, strict=True)
        ]
        return encode_index(entries, sum(file.tensor_bytes for file in planned), source.metadata)

    def finish(stage: str, names: Sequence[str]) -> None:
        if any(found is not None for found in known):
            write_file(stage, dict(zip(names, checksums, strict=True)))

    names = stages.publish(placed, index_of, finish)
    on_progress(total, total)
    return names, planned


class _Copying:
    """Copies parts of files, with a job for each folder.

    Args:
        source: What is read.
        known: The checksums of its files, as far as they have some.
        options: How.
        on_progress: Called with the bytes that are written.
    """

    def __init__(
        self,
        source: _Source,
        known: Sequence[FileChecksums | None],
        options: Options,
        on_progress: Callable[[int], object],
    ) -> None:
        self._headers = source.headers
        self._sources = [
            (header.path, header.identity.nbytes, blocks_of(header, found), header.identity.tag)
            for header, found in zip(source.headers, known, strict=True)
        ]
        self._options = options
        self._on_progress = on_progress

    def run(
        self, planned: Sequence[PlannedPart], placed: Sequence[Placed], stages: Stages
    ) -> list[FileChecksums]:
        """Writes files, durably; returns their checksums."""
        by_folder: dict[int, list[int]] = {}
        for number, file in enumerate(planned):
            by_folder.setdefault(file.folder, []).append(number)
        jobs: dict[int, _native.Job] = {}
        outcomes: dict[int, list[bytes]] = {}
        shared = read_job.shared(self._options, len(by_folder))
        staging_bytes = min(_MOST_STAGING_BYTES, _STAGING_BYTES // len(by_folder))
        try:
            for folder, numbers in by_folder.items():
                nbytes = sum(planned[number].nbytes for number in numbers)
                engine_job.calibrate_once(stages.paths[folder], shared, nbytes)
            for folder, numbers in by_folder.items():
                files = [(planned[number], placed[number].staged) for number in numbers]
                with self._naming(stages.folders.paths[folder]):
                    jobs[folder] = self._start(files, shared, staging_bytes)
            while len(outcomes) < len(jobs):
                next(job for folder, job in jobs.items() if folder not in outcomes).wait(_TICK_S)
                for folder, job in jobs.items():
                    if folder not in outcomes and job.done():
                        with self._naming(stages.folders.paths[folder]):
                            outcomes[folder] = job.result()["checksums"]
                self._on_progress(sum(job.progress()[0] for job in jobs.values()))
        finally:
            read_job.stop(list(jobs.values()))
        found: dict[int, bytes] = {}
        for folder, numbers in by_folder.items():
            found |= zip(numbers, outcomes[folder], strict=True)
        return [FileChecksums(file.nbytes, found[number]) for number, file in enumerate(planned)]

    def _naming(self, folder: str) -> _Naming:
        return _Naming(self._headers, folder)

    def _start(
        self, files: Sequence[tuple[PlannedPart, str]], options: Options, staging_bytes: int
    ) -> _native.Job:
        return engine_job.start_copy(
            [
                (path, file.header, np.array(file.extents(), np.int64), file.nbytes, None, None)
                for file, path in files
            ],
            self._sources,
            options,
            source=storage.engine_root(self._headers[0].source),
            readers=_READERS,
            staging_bytes=staging_bytes,
        )


class _Naming:
    """Names, in errors of the engine, the folder that they are about, or says that the model has changed."""

    def __init__(self, headers: Sequence[Header], folder: str) -> None:
        self._headers = headers
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, WaystationError) or isinstance(error, Cancelled):
            return
        changed = next((header for header in self._headers if header.path == error.context.get("path")), None)
        if changed is None:
            error.where(folder=self._folder)
        else:
            changed.check_unchanged()  # which tells more of what is at the path


def _carry(directory: str | None, carried: Mapping[str, int], stage: str) -> None:
    """Copies other files with their permissions, durably."""
    for path in carried:
        assert directory is not None, "there are none beside single files"
        content = storage.read_file(os.path.join(directory, path), limit_bytes=2 * CARRIED_BYTES)
        target = os.path.join(stage, path)
        parent = os.path.dirname(path)
        while parent and not storage.is_directory(os.path.join(stage, parent)):
            storage.make_directory(os.path.join(stage, parent), parents=True)
        _native.write_small_files([(target, content)])
        if not storage.is_in_store(directory):
            disks.copy_permissions(os.path.join(directory, path), target)
    _native.sync_paths([os.path.join(stage, path) for path in carried])
    parents = {os.path.dirname(path) for path in carried} - {""}
    above = {parent[:place] for parent in parents for place, sign in enumerate(parent) if sign == os.sep}
    _native.sync_paths([os.path.join(stage, parent) for parent in sorted(parents | above)])


def _compare(
    placed: Sequence[Placed], checksums: Sequence[FileChecksums], on_progress: Callable[[int], object]
) -> None:
    """Reads all files again, those of different folders at the same time.

    Raises:
        Corrupt: A disk has not kept what was written to it.
    """
    by_folder: dict[int, list[int]] = {}
    for number, file in enumerate(placed):
        disks.forget_cached(file.staged)
        by_folder.setdefault(file.folder, []).append(number)
    done = dict.fromkeys(by_folder, 0)
    is_over = threading.Event()

    def compare(folder: int) -> None:
        def advance(so_far: int, _total: int) -> None:
            if is_over.is_set():
                raise Cancelled("the comparison was cancelled")
            done[folder] = so_far

        numbers = by_folder[folder]
        headers = read_headers([placed[number].staged for number in numbers])
        for number, found in zip(numbers, sum_files(headers, advance), strict=True):
            if found != checksums[number]:
                raise Corrupt(
                    "the disk has not kept what was written to it: read again, the file has other bytes; the "
                    "model was not spread. Check the disk, or give another one",
                    path=placed[number].staged,
                )

    with Threads(len(by_folder), "spread") as workers:
        try:
            running = [workers.submit(compare, folder) for folder in by_folder]
            while not all(work.done() for work in running):
                is_over.wait(_TICK_S)
                on_progress(sum(done.values()))
                for work in running:
                    if work.done():
                        work.result()
            for work in running:
                work.result()
        finally:
            is_over.set()
