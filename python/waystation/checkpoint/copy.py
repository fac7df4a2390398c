"""`copy`: one checkpoint from one storage to another, without a load.

The files are copied as they are: the metadata through this process, all else by the engine, from storage to
storage. What differs between a disk and an object store is the names of directories, and where the record of
a handler's files is (`copy_targets`). Checkpoints in Orbax's layouts are copied whole (`copy_orbax`).

What can go wrong, in order: there is no checkpoint, or something is at the destination: nothing is made. A
block or file is not what its checksum says: Corrupt, and what was copied is removed. The source is
overwritten: the copy begins again with what is there now. Killed, interrupted, or a store that cannot be
reached: what was copied stays, invisible, and a copy of the same checkpoint that is begun again takes the
files that are whole. Another writer is faster at the destination: Conflict, and its checkpoint stays.
Invariant: nothing is visible at the destination before every byte has been verified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from waystation import _native, storage
from waystation._arguments import require_boolean, require_function
from waystation._errors import (
    Cancelled,
    Corrupt,
    DiskFull,
    InvalidInput,
    NotFound,
    Unavailable,
    Unsupported,
    WaystationError,
)
from waystation._options import Options
from waystation._options.in_effect import current_options
from waystation.checkpoint.copy_orbax import TreeTarget, open_tree
from waystation.checkpoint.copy_targets import CopiedFile, CopiedPart, Target, open_target
from waystation.checkpoint.paths import PathLike, layout_in, locate, require_checkpoint
from waystation.checkpoint.replaced import Held, read_what_is_there
from waystation.checkpoint.saving import check_name
from waystation.layouts.native import engine_job, names
from waystation.layouts.native.read import (
    LOADED_FILES,
    OpenCheckpointable,
    decode_checkpointable,
    name_arrays,
    open_checkpoint,
    read_files,
)
from waystation.layouts.native.records import (
    FILES,
    HANDLED,
    PYTREE,
    CheckpointableRecord,
    CheckpointRecord,
    Digest,
    read_vouched,
)
from waystation.layouts.native.tables import FILE_ENTRY
from waystation.storage.bandwidth import Bandwidth
from waystation.storage.leases import Leases
from waystation.storage.store_leases import StoreLeases
from waystation.transfers.handle import Progress

_log = logging.getLogger("waystation")

# Of one engine job, unless a file has more: what a copy that is killed has to do again.
_JOB_BYTES = 256 << 20
_JOB_FILES = 1024
# Pieces that are read at a time: answers of a store take long.
_READERS_OF_STORE, _READERS_OF_DISK = 16, 4
_TICK_S = 0.1

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """What a copy has done.

    Attributes:
        path: The checkpoint that it has made.
        files: Its files of data, and those of handlers.
        nbytes: Bytes of these.
        found_bytes: Bytes of those that were there already, from a copy that did not end.
        elapsed_s: Seconds that it took.
        shared_bytes: Bytes of those that another checkpoint in the store has, to which it refers.
    """

    path: str
    files: int
    nbytes: int
    found_bytes: int
    elapsed_s: float
    shared_bytes: int = 0


def copy(
    source: PathLike,
    destination: PathLike,
    *,
    overwrite: bool = False,
    bytes_per_second: int | None = None,
    on_progress: OnProgress = lambda _done, _total: None,
) -> CopyStatistics:
    """Copies a checkpoint, between any two places: disks, and object stores.

    Every block is compared with its checksum on the way, and the copy is visible only once all of it is there
    and durable. A copy that was killed or interrupted can be begun again: it takes the files that were whole
    already; in Orbax's layouts it copies all of them again. One process calls this, also in a program of
    several.

    Args:
        source: The checkpoint, in the native layout or one of Orbax's. What Orbax itself has written has no
            checksums: of its files the lengths are compared.
        destination: The path that the copy is to have.
        overwrite: Replace a checkpoint that is there. It stays whole until the copy is.
        bytes_per_second: How much to read in a second at most, on average; None for no bound.
        on_progress: Called with `(bytes done, bytes in all)` as it goes.

    Raises:
        CheckpointNotFound, InvalidInput: There is no checkpoint at `source`, or there cannot be one at
            `destination`.
        Conflict: Something is at `destination`, or another writer was faster.
        Corrupt: The source is damaged; the error names the file and the offset. Nothing was copied.
        Unsupported: The source is one part of a save to local storage, or of a checkpoint of Orbax's; or it
            would replace one of Orbax's layout in a store.
        Unavailable: Something cannot be reached; call again, and the copy goes on.
    """
    require_function("on_progress", on_progress)
    require_boolean("overwrite", overwrite)
    with Bandwidth(bytes_per_second) as bandwidth:
        return Copying(bandwidth, Progress(), on_progress).run(
            locate(source), locate(destination), overwrite=overwrite
        )


class Copying:
    """How checkpoints are copied.

    Args:
        bandwidth: What they may take.
        progress: Is told about jobs, and may cancel.
        on_progress: Called with `(bytes done, bytes in all)` of one checkpoint as it goes.
        may_go_on: Whether a copy that is cancelled leaves what it has copied, for one that goes on.
    """

    def __init__(
        self, bandwidth: Bandwidth, progress: Progress, on_progress: OnProgress, *, may_go_on: bool = True
    ) -> None:
        self._may_go_on = may_go_on
        self._bandwidth = bandwidth
        self._progress = progress
        self._on_progress = on_progress

    def run(
        self,
        origin: str,
        target: str,
        *,
        overwrite: bool,
        replaces: storage.Identity | None = None,
        beside: str | None = None,
    ) -> CopyStatistics:
        """Copies one checkpoint.

        Args:
            origin: The checkpoint, located.
            target: Where to, located.
            overwrite: Replace a checkpoint that is there.
            replaces: The version of its record that may be replaced; None for whatever is there.
            beside: A checkpoint beside `target` in a store, to whose files the copy may refer where they hold
                the same.

        Raises:
            Conflict: Another version is there, or something that is not to be replaced.
        """
        if origin == target:
            raise InvalidInput(f"'{origin}' cannot be copied to itself; give another path", path=origin)
        require_checkpoint(origin)
        options = current_options()

        def begin() -> Target:
            return open_target(target, options, overwrite=overwrite, replaces=replaces, beside=beside)

        def copy_what_is_there(held: Held) -> CopyStatistics:
            if layout_in(held.root) == "orbax":
                return self._copy_tree(held, target, options, overwrite=overwrite)
            return self._copy(held, target, options, begin)

        with reading(origin):
            return read_what_is_there(origin, options, copy_what_is_there)

    def _copy_tree(self, held: Held, target: str, options: Options, *, overwrite: bool) -> CopyStatistics:
        """Copies a checkpoint in a layout of Orbax."""
        begun_s = time.monotonic()
        tree = open_tree(held)
        source = _Source(tree.root, [CopiedPart("", "", "", b"", {}, tree.files)], ())
        place = TreeTarget(target, tree, options, overwrite=overwrite)
        try:
            self._copy_files(source, place, place.lacking(), options)
            place.commit()
        except BaseException as error:
            place.discard()
            if isinstance(error, WaystationError) and not isinstance(error, Cancelled):
                with contextlib.suppress(WaystationError):
                    tree.require_unchanged()  # else what failed may come of that
            raise
        return _done(held, target, source, begun_s)

    def _copy(self, held: Held, target: str, options: Options, begin: Callable[[], Target]) -> CopyStatistics:
        begun_s = time.monotonic()
        record, source = _opened(held, in_store=storage.is_in_store(target))
        place = begin()
        try:
            parts = place.share(source.parts)
            place.write_metadata(parts)
            place.take_what_is_there(parts)
            before = place.found_bytes + place.shared_bytes
            self._copy_files(source, place, place.lacking(parts), options, before)
            place.commit(record, parts)
        except BaseException as error:
            # Whoever is interrupted, or cannot reach something, may want to go on.
            is_over = isinstance(error, Cancelled) and not self._may_go_on
            place.leave() if _can_go_on(error) and not is_over else place.discard()
            raise
        return _done(held, target, source, begun_s, place.found_bytes, place.shared_bytes)

    def _copy_files(
        self,
        source: _Source,
        place: Target | TreeTarget,
        lacking: Sequence[tuple[str, CopiedFile]],
        options: Options,
        done: int = 0,
    ) -> None:
        """Copies files to the paths that they are given with; `done` bytes of all were there."""
        total = sum(file.nbytes for file in source.files)
        self._on_progress(done, total)
        for batch in _batches(lacking):
            if self._progress.cancelled:
                raise Cancelled(f"the copy to '{place.path}' was cancelled; begin it again to go on")
            job = engine_job.start_copy(
                [
                    (
                        path,
                        b"",
                        np.array([number, 0, file.nbytes], np.int64),
                        file.nbytes,
                        file.checksums,
                        None if file.digest is None else file.digest.crc64,
                    )
                    for number, (path, file) in enumerate(batch)
                ],
                [(file.source, file.nbytes, None, None) for _, file in batch],
                options,
                source=source.root.engine,
                root=storage.engine_of(place.path),
                group=place.group,
                readers=_READERS_OF_STORE if storage.is_in_store(source.root.path) else _READERS_OF_DISK,
                throttle=self._bandwidth.path,
            )
            self._wait(job, source, done, total)
            done += sum(file.nbytes for _, file in batch)
            self._on_progress(done, total)

    def _wait(self, job: _native.Job, source: _Source, before: int, total: int) -> None:
        self._progress.add(job)
        try:
            while not job.wait(_TICK_S):
                self._on_progress(before + job.progress()[0], total)
            job.result()
        except WaystationError as error:
            raise source.described(error) from error
        finally:
            job.cancel()
            job.wait()
            self._progress.close()


def _done(
    held: Held, target: str, source: _Source, begun_s: float, found_bytes: int = 0, shared_bytes: int = 0
) -> CopyStatistics:
    """What a copy has done that is there now."""
    nbytes = sum(file.nbytes for file in source.files)
    elapsed_s = time.monotonic() - begun_s
    done = CopyStatistics(target, len(source.files), nbytes, found_bytes, elapsed_s, shared_bytes)
    _log.info(
        "copied '%s' to '%s': %d bytes in %d files, %d of them found there, %.3f s",
        held.target,
        done.path,
        done.nbytes,
        done.files,
        done.found_bytes,
        done.elapsed_s,
    )
    return done


@contextlib.contextmanager
def reading(origin: str) -> Iterator[bool]:
    """Keeps collectors from removing a checkpoint within the block, where this process may write there.

    Yields:
        False if one is about to.
    """
    parent, name = os.path.split(origin)
    if not storage.of(origin).is_listable:
        yield True
        return
    leases = StoreLeases(parent) if storage.is_in_store(origin) else Leases(parent)
    with leases.hold(name) as may_read:
        yield may_read


def _can_go_on(error: BaseException) -> bool:
    if not isinstance(error, Exception):
        return True  # Ctrl-C, or the program ends
    return isinstance(error, Cancelled | Unavailable) and not isinstance(error, DiskFull)


def _batches(
    files: Sequence[tuple[str, CopiedFile]],
) -> Iterator[list[tuple[str, CopiedFile]]]:
    batch: list[tuple[str, CopiedFile]] = []
    nbytes = 0
    for path, file in files:
        if batch and (nbytes + file.nbytes > _JOB_BYTES or len(batch) == _JOB_FILES):
            yield batch
            batch, nbytes = [], 0
        batch.append((path, file))
        nbytes += file.nbytes
    if batch:
        yield batch


# ---- the source --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint that is copied, as it was opened.

    Attributes:
        root: Its directory.
        parts: Its checkpointables, as the copy is to have them.
        states: Those of them that are states.
    """

    root: storage.Root
    parts: Sequence[CopiedPart]
    states: Sequence[OpenCheckpointable]

    @property
    def files(self) -> list[CopiedFile]:
        """All files that the engine copies."""
        return [file for part in self.parts for file in part.files]

    def described(self, error: WaystationError) -> WaystationError:
        """An error of the engine: what is missing or damaged here is damage of the checkpoint."""
        path = str(error.context.get("path", ""))
        if not path.startswith(os.path.join(self.root.path, "")):
            return error
        if isinstance(error, NotFound):
            return Corrupt(f"a committed file is missing: {error.message}", **error.context)
        if isinstance(error, Corrupt):
            for state in self.states:
                name_arrays(state, error)
            error.where(checkpoint=self.root.path)
        return error


def _opened(held: Held, *, in_store: bool) -> tuple[CheckpointRecord, _Source]:
    """Reads and verifies the metadata of a checkpoint.

    Raises:
        Unsupported: It cannot be copied.
    """
    root, target = held.root, held.target
    if layout_in(root) is None:
        held.require_current()
        require_checkpoint(target)
    record = open_checkpoint(target, root)
    if record.local is not None:
        raise Unsupported(
            f"'{target}' is one process's part of a save to local storage, which is a checkpoint only beside "
            "those of the others; load it in the program, and save it to storage that its processes share",
            path=target,
        )
    parts, states = [], []
    for name in record.checkpointables:
        try:
            check_name(name)  # it becomes that of a directory
        except InvalidInput as error:
            raise Corrupt(f"the record of '{target}' is malformed: {error.message}", path=target) from error
        part, state = _part(target, record, name, root, in_store=in_store)
        parts.append(part)
        states += [] if state is None else [state]
    return record, _Source(root, parts, states)


def _part(
    target: str, record: CheckpointRecord, name: str, root: storage.Root, *, in_store: bool
) -> tuple[CopiedPart, OpenCheckpointable | None]:
    directory, digest = record.entry(target, name)
    metadata = read_files(directory, digest, root, paged_from_bytes=None)
    own = metadata.decode_record()
    if own.kind != PYTREE:
        return _handled(name, directory, metadata.record, own, in_store=in_store), None
    state = decode_checkpointable(metadata, root)
    contents = dict(zip(LOADED_FILES, metadata.contents, strict=True))
    others = {os.path.join(directory, file): own.tables[file] for file in own.tables if file not in contents}
    for path, content in zip(others, _vouched(others, root), strict=True):
        contents[os.path.basename(path)] = content
    sizes = state.tables.files["file_bytes"].tolist()
    own_content = metadata.record
    if own.places:
        alone, contents[names.FILE_TABLE] = on_its_own(own, contents[names.FILE_TABLE])
        own_content = alone.encode()
    files = [
        CopiedFile(os.path.basename(path), path, nbytes, state.tables.file_checksums(number))
        for number, (path, nbytes) in enumerate(zip(state.paths(), sizes, strict=True))
    ]
    return CopiedPart(name, PYTREE, names.CHECKPOINTABLE_RECORD, own_content, contents, files), state


def on_its_own(own: CheckpointableRecord, file_table: bytes) -> tuple[CheckpointableRecord, bytes]:
    """The record and the table of files of a copy that has all its files, of a state that shares some with
    other checkpoints in a store."""
    (section,) = _native.decode_table("files", file_table, names.FILE_TABLE)
    files = np.frombuffer(section, FILE_ENTRY).copy()
    files["location"] = 0
    table = _native.encode_table("files", [files.tobytes()])
    return dataclasses.replace(
        own, tables={**own.tables, names.FILE_TABLE: Digest.of(table)}, places=()
    ), table


def _vouched(digests: dict[str, Digest], root: storage.Root) -> list[bytes]:
    try:
        return read_vouched(digests, root)
    except NotFound as error:
        raise Corrupt(f"a committed file is missing: {error.message}", **error.context) from error


def _handled(
    name: str, directory: str, content: bytes, own: CheckpointableRecord, *, in_store: bool
) -> CopiedPart:
    """Files of a handler: in a store they have a directory of their own beside the record, on a disk the
    record is among them."""
    place = own.files_directory(directory)
    kind = FILES if in_store or names.HANDLED_RECORD in own.files else HANDLED
    if kind != own.kind:
        content = dataclasses.replace(own, kind=kind).encode()
    below = f"{names.FILES}/" if kind == FILES else ""
    files = [
        CopiedFile(f"{below}{file}", os.path.join(place, *file.split("/")), digest.nbytes, None, digest)
        for file, digest in own.files.items()
    ]
    record = names.HANDLED_RECORD if kind == HANDLED else names.CHECKPOINTABLE_RECORD
    return CopiedPart(name, kind, record, content, {}, files)
