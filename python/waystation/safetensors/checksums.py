"""Checksums of published files, in one small file beside them: what `safetensors` itself has none of.

`checksums.waystation.json` holds, for each file of its directory that was summed, the length and the
CRC-64/NVME of every block of 256 KiB, headers included; it is sealed by a checksum of its own. Loads verify
the blocks that they read against it. It protects against damage, not against those who could change it too.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from waystation import _native, storage
from waystation._arguments import require_function
from waystation._errors import (
    Corrupt,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unsupported,
    WaystationError,
    naming_directory,
)
from waystation._threads import Threads
from waystation.layouts.native.records import dump_json
from waystation.safetensors.headers import LENGTH_BYTES, LIMIT_BYTES, Header, check_unchanged
from waystation.safetensors.index import SUFFIX, read_index
from waystation.safetensors.sources import WHOLE_FILE, Files, checkpoint_of, find
from waystation.storage import write_lock
from waystation.storage.attempts import new_attempt_id, remove_dead

FILE_NAME = "checksums.waystation.json"

_VERSION = 1
_LIMIT_BYTES = 256 << 20  # the checksums of six terabytes
_CHUNK_BYTES = 16 * _native.BLOCK_BYTES
_THREADS = 8

OnProgress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """What is known of one file.

    Attributes:
        nbytes: Its length.
        blocks: The checksum of each of its blocks, as little-endian 64-bit integers.
    """

    nbytes: int
    blocks: bytes


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file that is not what was summed.

    Attributes:
        path: The file.
        problem: What is wrong with it.
        tensors: The names of tensors that have bytes in a damaged block.
    """

    path: str
    problem: str
    tensors: tuple[str, ...]


# ---- the file ----------------------------------------------------------------------------------


def read_checksums(directory: str, source: storage.Storage | None = None) -> dict[str, FileChecksums]:
    """What the file in a directory says, by names of files; nothing where there is none.

    Args:
        directory: The directory.
        source: Its storage; by default that of the options in effect.

    Raises:
        Corrupt: It is damaged.
        Unsupported: It is of a newer version.
    """
    path = os.path.join(directory, FILE_NAME)
    source = source or storage.of(path)
    try:
        (content,) = source.read_files([path], limit_bytes=_LIMIT_BYTES)
    except NotFound:
        return {}
    except PermissionDenied:
        if source.engine is None:
            raise
        return {}  # stores that may not be listed answer so for what is not there
    return {name: FileChecksums(*found) for name, found in _native.parse_checksums(content, path).items()}


def write_file(directory: str, files: dict[str, FileChecksums]) -> str:
    """Writes the file of a directory, in place of the one that is there; returns its path."""
    body = {
        "version": _VERSION,
        "block_bytes": _native.BLOCK_BYTES,
        "files": {
            name: {"nbytes": found.nbytes, "crc64": base64.b64encode(found.blocks).decode()}
            for name, found in sorted(files.items())
        },
    }
    path = os.path.join(directory, FILE_NAME)
    remove_dead(directory, FILE_NAME)
    storage.of(path).replace(path, _native.seal_json(dump_json(body)), new_attempt_id())
    return path


# ---- summing and verifying ---------------------------------------------------------------------


def write_checksums(files: Files, *, on_progress: OnProgress = lambda _done, _total: None) -> list[str]:
    """Sums the files of a model, and writes `checksums.waystation.json` beside them. Loads then verify them.

    What that file says of other files stays.

    Args:
        files: What `load` takes.
        on_progress: Called with the bytes that have been summed, and those to sum.

    Returns:
        The paths of what was written: one, unless the files are in several directories.

    Raises:
        NotFound, InvalidInput, Corrupt: As `open` does.
        Conflict: A file changed meanwhile, or another process has been replacing what is there for too long.
        Unsupported: They are in an object store.
    """
    require_function("on_progress", on_progress)
    headers = find(files)
    distant = next((header.path for header in headers if header.source.engine is not None), None)
    if distant is not None:
        raise Unsupported(
            f"'{distant}' is in an object store, and checksums are written beside files of this system only; "
            "sum the model before it is uploaded, and upload the checksums with it",
            path=distant,
        )
    for directory in dict.fromkeys(os.path.dirname(header.path) for header in headers):
        _refuse_checkpoint(directory)
    summed = sum_files(headers, on_progress)
    by_directory: dict[str, list[tuple[Header, FileChecksums]]] = {}
    for header, found in zip(headers, summed, strict=True):
        by_directory.setdefault(os.path.dirname(header.path), []).append((header, found))
    written = []
    for directory, pairs in by_directory.items():
        with write_lock.held(directory):
            check_unchanged(header for header, _ in pairs)
            known = read_checksums(directory)
            known |= {os.path.basename(header.path): found for header, found in pairs}
            with naming_directory(directory):
                written.append(write_file(directory, known))
    return written


def forget_checksums(directory: str, file_names: Sequence[str]) -> None:
    """Removes what is known of files that are about to be replaced; the caller holds the `write_lock`.

    Checksums that cannot be read stay as they are, for loads to refuse.
    """
    try:
        known = read_checksums(directory)
    except (Corrupt, Unsupported):
        return
    remaining = {name: found for name, found in known.items() if name not in file_names}
    if len(remaining) != len(known):
        write_file(directory, remaining)


def verify_files(files: Files, *, on_progress: OnProgress = lambda _done, _total: None) -> list[DamagedFile]:
    """Compares every byte of the files of a model with `checksums.waystation.json` beside them.

    Args:
        files: What `load` takes.
        on_progress: Called with the bytes that have been read, and those to read.

    Returns:
        The files that are damaged; a file that was summed and is missing is one of them.

    Raises:
        InvalidInput: There are no checksums of a file.
        NotFound, Conflict: As `write_checksums` does.
        Corrupt: The checksums, or files of which there are none, are damaged.
    """
    return verify_model(files, on_progress=on_progress)[0]


def verify_model(files: Files, *, on_progress: OnProgress) -> tuple[list[DamagedFile], int, int]:
    """What `verify_files` returns, and how many files and bytes were read."""
    require_function("on_progress", on_progress)
    known = _Known()
    damaged: list[DamagedFile] = []
    failure: Corrupt | NotFound | None = None
    try:
        headers = find(files)
    except (Corrupt, NotFound) as error:
        failure, headers = error, []
    present = {header.path for header in headers}
    for path in _summed_paths(files, known, is_listed=failure is None):
        if not storage.is_there(path):
            damaged.append(DamagedFile(path, "is missing", _tensors_by_index(path)))
        elif path not in present:
            headers.append(_header_as_summed(path, known.of(path)))
    if failure is not None and not headers and not damaged:
        raise failure
    expected = require_checksums(headers, [known.of(header.path) for header in headers], more="")
    for header, wanted, found in zip(headers, expected, sum_files(headers, on_progress), strict=True):
        damage = _compare(header, wanted, found)
        if damage is not None:
            damaged.append(damage)
    if failure is not None and not damaged:  # the files are as they were summed: it is the index
        if not isinstance(failure, Corrupt):
            raise failure
        damaged.append(DamagedFile(str(failure.context.get("path", "")), failure.message, ()))
    return damaged, len(headers), sum(header.identity.nbytes for header in headers)


class _Known:
    """What the files of checksums in all directories say, each read once."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, FileChecksums]] = {}

    def in_directory(self, directory: str, source: storage.Storage | None = None) -> dict[str, FileChecksums]:
        """By names of files; `source` as `read_checksums` takes it."""
        if directory not in self._known:
            self._known[directory] = read_checksums(directory, source)
        return self._known[directory]

    def of(self, path: str, source: storage.Storage | None = None) -> FileChecksums | None:
        """Of one file; None if it has none."""
        directory, name = os.path.split(path)
        return self.in_directory(directory, source).get(name)


def _summed_paths(files: Files, known: _Known, *, is_listed: bool) -> list[str]:
    """The files that were summed and are meant, whether or not they are there.

    Args:
        files: What the user gave.
        known: The checksums.
        is_listed: Whether the files that are there are known already. Others are then meant only where
            nothing but the listing of a directory says which they are.
    """
    summed = []
    for path in map(storage.located, [files] if isinstance(files, str | os.PathLike) else files):
        is_directory = storage.is_directory(path)
        if not is_directory and not path.endswith(".json"):
            summed += [path] if known.of(path) is not None else []
            continue
        directory = path if is_directory else os.path.dirname(path)
        indexes = _indexes(directory) if is_directory else [path]
        if not (is_listed and (indexes or storage.is_there(os.path.join(directory, WHOLE_FILE)))):
            names_in = set(known.in_directory(directory))
            if is_directory and not is_listed and WHOLE_FILE in names_in:
                names_in = {WHOLE_FILE}
            elif len(indexes) == 1 and (named := _named_by(indexes)) is not None:
                names_in.intersection_update(named.values())
            summed += [os.path.join(directory, name) for name in sorted(names_in)]
    return summed


def _indexes(directory: str) -> list[str]:
    if not storage.of(directory).is_listable:
        return []
    names_in = [entry.name for entry in storage.entries_or_none(directory)]
    return [os.path.join(directory, name) for name in names_in if name.endswith(SUFFIX)]


def _named_by(indexes: Sequence[str]) -> dict[str, str] | None:
    """The file of each tensor, by indexes; None where one cannot be read."""
    try:
        return {tensor: name for path in indexes for tensor, name in read_index(path).weight_map.items()}
    except (Corrupt, NotFound):
        return None


def _tensors_by_index(path: str) -> tuple[str, ...]:
    """The tensors of a file that is missing, as far as an index tells."""
    directory, name = os.path.split(path)
    named = _named_by(_indexes(directory)) or {}
    return tuple(tensor for tensor, file in named.items() if file == name)


def _header_as_summed(path: str, wanted: FileChecksums | None) -> Header:
    """The header of a file that may be damaged or cut off: as far as can be told, that of the summed file."""
    source = storage.of(path)
    with source.opened(path) as file:
        if file.status.kind != "file":
            raise Corrupt("a regular file was expected here", path=path)
        content = file.read(0, min(file.status.nbytes, LENGTH_BYTES + LIMIT_BYTES))
        try:
            nbytes = file.status.nbytes if wanted is None else wanted.nbytes
            metadata, tensors, start = _native.parse_safetensors_header(content, nbytes, path)
        except WaystationError:
            return Header(path, file.status.identity, None, [], 0, source)
        return Header(path, file.status.identity, metadata, tensors, start, source)


def checksums_of(headers: Sequence[Header]) -> list[FileChecksums | None]:
    """The checksums of files, None for those that have none."""
    known = _Known()
    return [known.of(header.path, header.source) for header in headers]


def require_checksums(
    headers: Sequence[Header],
    found: Sequence[FileChecksums | None],
    more: str = ", or load it without: verify=False, or array.loading.verify = None of the Context",
) -> list[FileChecksums]:
    """The checksums of files that all have some.

    Args:
        headers: Of the files.
        found: The checksums of each.
        more: What else can be done where there are none.

    Raises:
        InvalidInput: One has none, or is a file of a checkpoint.
    """
    for header, own in zip(headers, found, strict=True):
        if own is None:
            _refuse_checkpoint(os.path.dirname(header.path))
            raise InvalidInput(
                f"there are no checksums of the file; run 'waystation sum' where it is known to be whole"
                f"{more}",
                path=header.path,
            )
    return [own for own in found if own is not None]


def _refuse_checkpoint(directory: str) -> None:
    """Refuses files of checkpoints."""
    checkpoint = checkpoint_of(directory)
    if checkpoint is not None:
        raise InvalidInput(
            f"'{directory}' is (in) a checkpoint, which has checksums of its own: loads of it and "
            f"'waystation verify {checkpoint}' check them",
            path=directory,
        )


def blocks_of(header: Header, checksums: FileChecksums | None) -> bytes | None:
    """The block checksums of a file, None if it has none.

    Raises:
        Corrupt: They are of a file of another length.
    """
    if checksums is None:
        return None
    if checksums.nbytes != header.identity.nbytes:
        header.check_unchanged()  # they may be of the file that has taken its place
        raise Corrupt(
            f"the file has {header.identity.nbytes} bytes, and had {checksums.nbytes} when it was summed; "
            "use another copy of it",
            path=header.path,
        )
    return checksums.blocks


def _compare(header: Header, wanted: FileChecksums, found: FileChecksums) -> DamagedFile | None:
    if wanted.nbytes != found.nbytes:
        problem = f"{found.nbytes} bytes are there, {wanted.nbytes} were summed"
        cut_off = tuple(name for name, _, _, _, end in header.tensors if end > found.nbytes)
        return DamagedFile(header.path, problem, cut_off)
    before, now = (np.frombuffer(one.blocks, "<u8") for one in (wanted, found))
    blocks = np.flatnonzero(before != now)
    if not len(blocks):
        return None
    step = _native.BLOCK_BYTES
    problem = f"{len(blocks)} of {len(now)} blocks differ, the first at {int(blocks[0]) * step}"
    return DamagedFile(header.path, problem, tuple(_tensors_in(header, set(blocks.tolist()))))


def _tensors_in(header: Header, blocks: set[int]) -> Iterable[str]:
    step = _native.BLOCK_BYTES
    for name, _, _, begin, end in header.tensors:
        if end > begin and not blocks.isdisjoint(range(begin // step, (end - 1) // step + 1)):
            yield name


def sum_files(headers: Sequence[Header], on_progress: OnProgress) -> list[FileChecksums]:
    """The checksums of files, several at a time; none of them changes meanwhile."""
    total = sum(header.identity.nbytes for header in headers)
    done = 0
    found: list[list[bytes]] = [[] for _ in headers]
    tasks = []
    before: dict[int, int] = {}  # bytes of each device: all that hold files are read at a time
    for place, header in enumerate(headers):
        held = before.setdefault(header.identity.device, 0)
        before[header.identity.device] = held + header.identity.nbytes
        chunks = range(0, header.identity.nbytes, _CHUNK_BYTES)
        tasks += [(held + begin, place, begin) for begin in chunks]
    tasks.sort()
    with Threads(_THREADS, "sum") as workers:
        parts = workers.map(lambda task: _sum_part(headers[task[1]], task[2]), tasks)
        for (_, place, begin), part in zip(tasks, parts, strict=True):
            found[place].append(part)
            done += min(_CHUNK_BYTES, headers[place].identity.nbytes - begin)
            on_progress(done, total)
    check_unchanged(headers)
    return [
        FileChecksums(header.identity.nbytes, b"".join(parts))
        for header, parts in zip(headers, found, strict=True)
    ]


def _sum_part(header: Header, begin: int) -> bytes:
    """The checksums of the blocks of one part of a file."""
    data = header.read(begin, min(_CHUNK_BYTES, header.identity.nbytes - begin))
    step = _native.BLOCK_BYTES
    view = memoryview(data)
    sums = [_native.crc64(view[at : at + step]) for at in range(0, len(data), step)]
    return np.array(sums, "<u8").tobytes()
