"""`verify`: reads every byte of a checkpoint and compares it with its checksum.

Unlike a load it does not stop at the first damage: every damaged block is reported, with the arrays
that have bytes in it, and every file that does not belong. Of a save to local storage it reads the one part
that it is shown, and says which that is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from waystation import _native
from waystation._errors import Corrupt, NotFound, WaystationError
from waystation.checkpoint.paths import PathLike, require_native_checkpoint, resolve
from waystation.layouts.native import handler_files, names, tables
from waystation.layouts.native.handler_files import HandlerFiles
from waystation.layouts.native.open import open_any
from waystation.layouts.native.read import OpenCheckpointable, arrays_at, open_checkpoint
from waystation.layouts.native.records import LocalPart

_WINDOW_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        path: The file.
        problem: What is wrong with it.
        arrays: Labels of the arrays that have bytes there.
    """

    path: str
    problem: str
    arrays: tuple[str, ...] = ()


@dataclass(slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        path: The checkpoint.
        damages: Everything that is wrong; empty for a whole checkpoint.
        strays: Files that the checkpoint's records do not name; harmless, but not its own.
        files: Data files, and files of handlers, that were read.
        bytes_read: Bytes of them.
        local: Which part of which save to local storage this is; None for a checkpoint that is complete.
    """

    path: str
    damages: list[Damage] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    files: int = 0
    bytes_read: int = 0
    local: LocalPart | None = None


def verify(
    path: PathLike, *, on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Verification:
    """Reads a checkpoint whole and checks every checksum.

    Args:
        path: The checkpoint.
        on_progress: Called with `(bytes read, bytes in all)` as it goes.

    Raises:
        NotFound, InvalidInput: There is no checkpoint at `path`. Damage is returned, not raised.
    """
    target = resolve(path)
    require_native_checkpoint(target)
    found = Verification(target)
    opened = list(_open_all(target, found))
    total = sum(_data_bytes(entry) for entry in opened)

    def on_read() -> None:
        on_progress(found.bytes_read, total)

    for entry in opened:
        if isinstance(entry, HandlerFiles):
            _verify_handler_files(entry, found, on_read)
            continue
        for file, file_path in enumerate(entry.paths()):
            _verify_file(entry, file, file_path, found, on_read)
    return found


def _data_bytes(entry: OpenCheckpointable | HandlerFiles) -> int:
    if isinstance(entry, HandlerFiles):
        return sum(digest.nbytes for digest in entry.record.files.values())
    return int(entry.tables.files["file_bytes"].sum())


def _open_all(target: str, found: Verification) -> Iterator[OpenCheckpointable | HandlerFiles]:
    known = {names.RECORD}
    try:
        record = open_checkpoint(target)
    except WaystationError as error:
        found.damages.append(Damage(os.path.join(target, names.RECORD), error.message))
        return
    found.local = record.local
    for name, (directory, _) in record.checkpointables.items():
        known.add(directory)
        try:
            opened = open_any(target, record, name)
        except WaystationError as error:
            where = str(error.context.get("path", os.path.join(target, directory)))
            found.damages.append(Damage(where, error.message))
            continue
        own = {names.CHECKPOINTABLE_RECORD, *opened.record.tables}
        if isinstance(opened, HandlerFiles):
            own.add(names.FILES)
            found.strays += opened.strays()
        else:
            own.update(map(os.path.basename, opened.paths()))
        found.strays += _others(os.path.join(target, directory), own)
        yield opened
    found.strays += _others(target, known)


def _verify_handler_files(opened: HandlerFiles, found: Verification, on_file: Callable[[], None]) -> None:
    for path, expected in opened.paths():
        found.files += 1
        try:
            handler_files.check(path, expected)
        except WaystationError as error:
            found.damages.append(Damage(path, error.message))
        found.bytes_read += expected.nbytes
        on_file()


def _others(directory: str, known: set[str]) -> list[str]:
    return [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if name not in known]


def _verify_file(
    opened: OpenCheckpointable, file: int, path: str, found: Verification, on_window: Callable[[], None]
) -> None:
    expected = int(opened.tables.files["file_bytes"][file])
    try:
        present = os.stat(path).st_size
    except OSError as error:
        found.damages.append(Damage(path, f"cannot be read: {error.strerror}"))
        return
    if present != expected:
        found.damages.append(Damage(path, f"has {present} bytes where {expected} were written"))
    found.files += 1
    end = min(present, expected)
    checksums = opened.tables.file_checksums(file)
    slab = _native.allocate(_WINDOW_BYTES)
    for start in range(0, end, _WINDOW_BYTES):
        _verify_window(opened, file, path, (start, min(end, start + _WINDOW_BYTES)), checksums, slab, found)
        found.bytes_read += min(end, start + _WINDOW_BYTES) - start
        on_window()


def _verify_window(
    opened: OpenCheckpointable,
    file: int,
    path: str,
    window: tuple[int, int],
    checksums: memoryview,
    slab: _native.Slab,
    found: Verification,
) -> None:
    """Verifies a window in one read; if that fails, block by block to find all the damage."""
    begin, end = window
    try:
        _read(path, opened, file, begin, end, checksums, slab)
        return
    except (Corrupt, NotFound):
        pass
    for start in range(begin, end, tables.BLOCK_BYTES):
        stop = min(end, start + tables.BLOCK_BYTES)
        try:
            _read(path, opened, file, start, stop, checksums, slab)
        except WaystationError as error:
            arrays = tuple(arrays_at(opened, file, start, stop))
            found.damages.append(Damage(path, f"bytes {start} to {stop}: {error.message}", arrays))


def _read(
    path: str,
    opened: OpenCheckpointable,
    file: int,
    begin: int,
    end: int,
    checksums: memoryview,
    slab: _native.Slab,
) -> None:
    file_bytes = int(opened.tables.files["file_bytes"][file])
    words = np.array([0, begin, end - begin, 0, slab.address], np.int64)
    job = _native.start_read([(path, file_bytes, checksums)], words, slab)
    job.wait()
    job.result()
