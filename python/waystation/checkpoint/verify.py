"""`verify`: reads every byte of a checkpoint and compares it with its checksum.

Unlike a load it does not stop at the first damage: every damaged block is reported, with the arrays
that have bytes in it, and every file that does not belong. Of a save to local storage it reads the one part
that it is shown, and says which that is. Of checkpoints in Orbax's layouts it verifies those that Waystation
has written: their file of checksums vouches for all others.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from waystation import _native, _plans, storage
from waystation._arguments import require_function
from waystation._errors import Corrupt, NotFound, PermissionDenied, Unsupported, WaystationError
from waystation._options.in_effect import current_options
from waystation.checkpoint.paths import Layout, PathLike, layout_in, locate, require_checkpoint
from waystation.checkpoint.replaced import Held, Replaced, read_what_is_there
from waystation.layouts.native import handler_files, names, tables
from waystation.layouts.native.handler_files import HandlerFiles
from waystation.layouts.native.read import OpenCheckpointable, arrays_at, open_any, open_checkpoint
from waystation.layouts.native.records import HANDLED, Digest, LocalPart
from waystation.layouts.orbax import checkpoint as orbax
from waystation.layouts.orbax import names as orbax_names
from waystation.layouts.orbax.checksums import Checksums, FileChecksums, is_removed
from waystation.layouts.orbax.open import decode_tree_files, read_tree_files
from waystation.storage.leases import without_marks

_WINDOW_BYTES = 64 << 20
_CHECKSUM_BYTES = 8  # of a block


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

    def add(self, error: WaystationError, path: str) -> None:
        """Adds what an error says of a file; raises one that says nothing of its bytes."""
        if isinstance(error, Unsupported | PermissionDenied):
            raise error
        self.damages.append(Damage(path, error.message))


def verify(
    path: PathLike, *, on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Verification:
    """Reads a checkpoint whole and checks every checksum.

    Args:
        path: The checkpoint.
        on_progress: Called with `(bytes read, bytes in all)` as it goes.

    Raises:
        NotFound, InvalidInput: There is no checkpoint at `path`. Damage is returned, not raised.
        Unsupported: Orbax has written it, without checksums, or a newer version of Waystation; or a symbolic
            link leads out of it (`file.follow_links_out`).
        PermissionDenied: The system refuses access to a file of it.
    """
    require_function("on_progress", on_progress)
    target = locate(path)
    require_checkpoint(target)
    return read_what_is_there(target, current_options(), lambda held: _verify(held, on_progress))


def _verify(held: Held, on_progress: Callable[[int, int], None]) -> Verification:
    found = Verification(held.root.path)
    layout = layout_in(held.root)
    if layout is None:
        held.require_current()
    files = _all_files(held.root, layout, found)
    total = sum(file.nbytes for file in files)

    def on_read() -> None:
        on_progress(found.bytes_read, total)

    for file in files:
        if isinstance(file, _WholeFile):
            _verify_whole(file, found, on_read)
        else:
            _verify_blocks(file, found, on_read)
    if (found.damages or found.strays) and held.was_replaced():
        raise Replaced  # what is missing or new says nothing of the checkpoint that is there now
    return found


def _all_files(
    root: storage.Root, layout: Layout | None, found: Verification
) -> list[_WholeFile | _BlockFile]:
    """The files to be verified; adds what is wrong with the records."""
    if layout == "orbax":
        checksums = _checksums_in(root, found)
        return [] if checksums is None else list(_files_of_orbax(root, checksums, found))
    return [file for entry in _open_all(root, found) for file in _files_of(entry, root)]


@dataclass(frozen=True, slots=True)
class _WholeFile:
    """A file that a digest vouches for."""

    path: str
    digest: Digest
    root: storage.Root

    @property
    def nbytes(self) -> int:
        return self.digest.nbytes


@dataclass(frozen=True, slots=True)
class _BlockFile:
    """A file whose blocks have checksums."""

    path: str
    nbytes: int
    checksums: Callable[[], bytes | memoryview]
    arrays_at: Callable[[int, int], Sequence[str]]  # that have bytes in a range
    root: storage.Root


def _files_of(
    entry: OpenCheckpointable | HandlerFiles, root: storage.Root
) -> Iterator[_WholeFile | _BlockFile]:
    if isinstance(entry, HandlerFiles):
        yield from (_WholeFile(*pair, root) for pair in entry.paths())
        return
    for number, path in enumerate(entry.paths()):
        yield _BlockFile(
            path,
            int(entry.tables.files["file_bytes"][number]),
            functools.partial(entry.tables.file_checksums, number),
            functools.partial(arrays_at, entry, number),
            root,
        )


def _open_all(root: storage.Root, found: Verification) -> Iterator[OpenCheckpointable | HandlerFiles]:
    target, known = root.path, {names.RECORD}
    try:
        record = open_checkpoint(target, root)
    except WaystationError as error:
        found.add(error, os.path.join(target, names.RECORD))
        return
    found.local = record.local
    for name, (directory, _) in record.checkpointables.items():
        known.add(directory)
        try:
            opened = open_any(target, record, name, root)
        except WaystationError as error:
            found.add(error, str(error.context.get("path", os.path.join(target, directory))))
            continue
        if isinstance(opened, HandlerFiles):
            own = {names.CHECKPOINTABLE_RECORD, names.FILES}
            found.strays += opened.strays()
        else:
            own = {names.CHECKPOINTABLE_RECORD, *opened.record.tables}
            own.update(map(os.path.basename, opened.paths()))
        if opened.record.kind != HANDLED:
            found.strays += _others(os.path.join(target, directory), own, root)
        yield opened
    others = _others(target, known, root)
    if storage.of(target).renames is None:  # where saves that run have their data, too
        others = [path for path in others if not names.is_passing(os.path.basename(path))]
    found.strays += others


def _others(directory: str, known: set[str], root: storage.Root) -> list[str]:
    present = without_marks([entry.name for entry in storage.entries_or_none(directory, root)])
    return [os.path.join(directory, name) for name in present if name not in known]


# ---- Orbax's layouts ---------------------------------------------------------------------------


def _checksums_in(root: storage.Root, found: Verification) -> Checksums | None:
    """The record of the file of checksums; None where that is damaged or missing.

    Raises:
        Unsupported: There never was such a file.
    """
    target = root.path
    try:
        checksums = Checksums.read(target, root)
    except Corrupt as error:
        found.damages.append(Damage(os.path.join(target, orbax_names.CHECKSUMS), error.message))
        return None
    if checksums is None and is_removed(target, root):
        found.damages.append(Damage(os.path.join(target, orbax_names.CHECKSUMS), "is missing"))
        return None
    whole = os.path.dirname(target)
    if checksums is None and orbax.had_checksums(whole):
        raise Unsupported(f"'{target}' is a part of a checkpoint; verify '{whole}'", path=target)
    if checksums is None:
        raise Unsupported(
            f"'{target}' has no checksums of data to verify: Waystation has not written it; load it and save "
            "it again, in any layout",
            path=target,
        )
    return checksums


def _files_of_orbax(
    root: storage.Root, checksums: Checksums, found: Verification
) -> Iterator[_WholeFile | _BlockFile]:
    """The files that a checkpoint of Orbax's layouts has; what is missing or does not belong is reported."""
    target = root.path
    named: Container[str] = checksums.checkpointables
    try:
        handlers = orbax.open_checkpoint(target, root).metadata.item_handlers
        named = handlers if isinstance(handlers, dict) else ()
    except WaystationError as error:
        found.add(error, str(error.context.get("path", target)))
    known = {orbax_names.CHECKSUMS, orbax_names.CHECKPOINT_METADATA, orbax_names.DELETION}
    for name, digest in checksums.top.items():
        known.add(name)
        yield _WholeFile(os.path.join(target, name), digest, root)
    for name in checksums.checkpointables:
        directory = os.path.join(target, name) if name else target
        if not storage.is_there(directory, root):
            if name in named:
                found.damages.append(Damage(directory, "is missing"))
            continue
        try:
            own = checksums.of(directory)
        except Corrupt as error:
            known.add(name)
            found.damages.append(Damage(checksums.path, error.message))
            continue
        if own is None:
            continue  # another one has come in its place
        if name:
            known.add(name)
            found.strays += _strays_below(directory, own, root)
        else:  # it is flat: its files are beside those of the checkpoint
            known |= {file.split("/")[0] for file in (*own.whole, *own.data)}
        yield from (_WholeFile(_joined(directory, file), digest, root) for file, digest in own.whole.items())
        arrays_in = _arrays_in(directory, own, root) if checksums.is_tree(name) else _no_arrays
        for file, nbytes in own.data.items():
            path = _joined(directory, file)
            blocks = functools.partial(_blocks_of, own, path, nbytes)
            yield _BlockFile(path, nbytes, blocks, functools.partial(arrays_in, path), root)
    found.strays += _others(target, known, root)


def _arrays_in(
    directory: str, own: FileChecksums, root: storage.Root
) -> Callable[[str, int, int], Sequence[str]]:
    """Tells which arrays of a tree have bytes in a range of a file; of a damaged tree nothing is known."""
    options = current_options()
    try:
        opened = decode_tree_files(read_tree_files(directory, options, own, root), options, own, root)
    except WaystationError:
        return _no_arrays
    return opened.arrays_at


def _no_arrays(_path: str, _begin: int, _end: int) -> Sequence[str]:
    return ()


def _blocks_of(own: FileChecksums, path: str, nbytes: int) -> bytes:
    (blocks,) = own.blocks([(path, nbytes)])
    return blocks


def _strays_below(directory: str, own: FileChecksums, root: storage.Root) -> list[str]:
    known = {_joined(directory, file) for file in (*own.whole, *own.data)}
    present = {os.path.join(directory, file) for file in storage.files_below(directory, root)}
    return sorted(present - known)


def _joined(directory: str, file: str) -> str:
    return os.path.join(directory, *file.split("/"))


# ---- files -------------------------------------------------------------------------------------


def _verify_whole(file: _WholeFile, found: Verification, on_file: Callable[[], None]) -> None:
    found.files += 1
    try:
        handler_files.check(file.path, file.digest, file.root)
    except WaystationError as error:
        found.add(error, file.path)
    found.bytes_read += file.nbytes
    on_file()


def _verify_blocks(file: _BlockFile, found: Verification, on_window: Callable[[], None]) -> None:
    try:
        status = storage.status(file.path, file.root)
        checksums = file.checksums()
    except WaystationError as error:
        found.add(error, str(error.context.get("path", file.path)))
        return
    if status is None or status.kind != "file":
        problem = "is missing" if status is None else "is no regular file"
        found.damages.append(Damage(file.path, problem, tuple(file.arrays_at(0, file.nbytes))))
        return
    present, end = status.nbytes, file.nbytes
    readable, lost = file, tuple[str, ...]()
    if present < end:
        # Nothing vouches for what is left of the block that was cut.
        end = present // tables.BLOCK_BYTES * tables.BLOCK_BYTES
        lost = tuple(file.arrays_at(end, file.nbytes))
        checksums = memoryview(checksums).cast("B")[: end // tables.BLOCK_BYTES * _CHECKSUM_BYTES]
        readable = dataclasses.replace(file, nbytes=end)
    if present != file.nbytes:
        problem = f"has {present} bytes where {file.nbytes} were written"
        found.damages.append(Damage(file.path, problem, lost))
    found.files += 1
    slab = _native.allocate(_WINDOW_BYTES)
    for start in range(0, end, _WINDOW_BYTES):
        _verify_window(readable, (start, min(end, start + _WINDOW_BYTES)), checksums, slab, found)
        found.bytes_read += min(end, start + _WINDOW_BYTES) - start
        on_window()


def _verify_window(
    file: _BlockFile,
    window: tuple[int, int],
    checksums: bytes | memoryview,
    slab: _native.Slab,
    found: Verification,
) -> None:
    """Verifies a window in one read; if that fails, block by block to find all the damage."""
    begin, end = window
    try:
        _read(file, begin, end, checksums, slab)
        return
    except (Corrupt, NotFound):
        pass
    for start in range(begin, end, tables.BLOCK_BYTES):
        stop = min(end, start + tables.BLOCK_BYTES)
        try:
            _read(file, start, stop, checksums, slab)
        except WaystationError as error:
            arrays = tuple(file.arrays_at(start, stop))
            found.damages.append(Damage(file.path, f"bytes {start} to {stop}: {error.message}", arrays))


def _read(file: _BlockFile, begin: int, end: int, checksums: bytes | memoryview, slab: _native.Slab) -> None:
    words = _plans.byte_reads([0], begin, end - begin, slab.address)
    # What was appended has been told already.
    job = _native.start_read(
        [(file.path, file.nbytes, checksums)], words, slab, root=file.root.engine, may_be_longer=True
    )
    job.wait()
    job.result()
