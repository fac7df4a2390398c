"""The commit: the single atomic act that makes a checkpoint visible, and its undoing.

Everything an attempt wrote is durable before any of these is called. Failure sequence of a new
checkpoint: killed before the rename, there is none; after it, there is one (the parent's entry may
be lost with the power until it is synced, and then there is none). Of an overwrite: the names are
swapped in one act, so the old one stands until the new one does. Where a file system cannot swap,
the new data moves in beside the old and the record, a single file, is replaced by rename: killed
before that, the new data are orphans inside the old checkpoint; killed after it, the old data are
inside the new one (`orphans` finds both). Directories move in and out whole, so an orphan is whole. Of the
removal of one checkpointable: killed before its record, nothing has happened; killed after it, the files are
inside a checkpoint that says who should have taken them away (`orphans` finds them).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping

from waystation import _native, storage
from waystation._errors import (
    CheckpointableNotFound,
    Conflict,
    Corrupt,
    NotDirectory,
    NotFound,
    PermissionDenied,
    Unsupported,
    WaystationError,
)
from waystation.layouts.native import in_store, names, records
from waystation.storage import leases, write_lock
from waystation.storage.attempts import Attempt

_log = logging.getLogger("waystation")


def publish_new(attempt: Attempt) -> None:
    """Makes the attempt the checkpoint, if the name is still free or that of an empty directory.

    Raises:
        Conflict: Something took the name meanwhile.
    """
    try:
        storage.renames(attempt.target).new(attempt.path, attempt.target)
    except (Conflict, NotDirectory):
        _rename_directory(attempt.path, attempt.target)
    _native.sync_paths(attempt.directories_to_sync())


def publish_over(attempt: Attempt, judged: storage.Identity | None = None) -> None:
    """Makes the attempt the checkpoint in place of the present one, which is whole until then.

    The attempt's directory holds afterwards what was replaced: see `remove_replaced`.

    Args:
        attempt: The attempt.
        judged: The version of the record that may be replaced; by default whatever is there.

    Raises:
        Conflict: Another version is there.
    """
    try:
        swap(attempt, judged)
    except Unsupported:
        replace_in_place(attempt, judged)


def _require_version(target: str, judged: storage.Identity | None) -> None:
    path = os.path.join(target, names.RECORD)
    if judged is not None and not storage.is_version(path, judged):
        raise in_store.replaced_meanwhile(target)


def swap(attempt: Attempt, judged: storage.Identity | None = None) -> None:
    """Swaps the attempt and the checkpoint in its place in one act, and brings along the marks that others
    have put there.

    Raises:
        Conflict: Another version is there than `judged`.
        Unsupported: The file system cannot do that.
    """
    with write_lock.held(attempt.target):
        _require_version(attempt.target, judged)
        leases.carry(attempt.target, attempt.path)
        storage.renames(attempt.target).exchange(attempt.path, attempt.target)
        leases.carry(attempt.path, attempt.target)  # those that were put meanwhile
        _native.sync_paths(attempt.directories_to_sync())


def replace_in_place(attempt: Attempt, judged: storage.Identity | None = None) -> None:
    """`publish_over` for file systems that cannot swap names: the record's rename is the commit.

    What a process has moved that was killed, one that goes on with its attempt finds moved.
    """
    with write_lock.held(attempt.target):
        _require_version(attempt.target, judged)
        generation, replaced, version = _present(attempt.target)
        prepared = read_record(attempt.path)
        record = dataclasses.replace(prepared, generation=generation + 1)
        _move_in(attempt, prepared, record, {}, version)
        _take_out(attempt, zip(replaced, replaced, strict=True))


def add_in_place(attempt: Attempt) -> None:
    """Adds an attempt's checkpointables to the checkpoint at its target, whose others stay as they are: a new
    generation of the record, which names them too, is the act.

    Raises:
        Conflict: The checkpoint has one of them meanwhile.
    """
    with locked(attempt.target):
        (present, version), prepared = read_version(attempt.target), read_record(attempt.path)
        both = sorted(present.checkpointables.keys() & prepared.checkpointables.keys())
        if both:
            raise Conflict(
                f"'{attempt.target}' has a checkpointable '{both[0]}' already; it was left alone",
                path=attempt.target,
            )
        record = dataclasses.replace(present, generation=present.generation + 1)
        _move_in(attempt, prepared, record, present.checkpointables, version)


def _move_in(
    attempt: Attempt,
    prepared: records.CheckpointRecord,
    record: records.CheckpointRecord,
    kept: Mapping[str, tuple[str, records.Digest]],
    version: storage.Identity | None,
) -> None:
    """Moves an attempt's data in beside what is at its target, and then publishes a record that names both
    them and what is kept; what cannot be published is moved out again."""
    target = attempt.target
    moved = {
        name: (names.moved_in(directory, attempt.id), digest)
        for name, (directory, digest) in prepared.checkpointables.items()
    }
    own = [directory for directory, _ in prepared.checkpointables.values()]
    places = [directory for directory, _ in moved.values()]
    try:
        for directory, place in zip(own, places, strict=True):
            if not storage.is_there(os.path.join(target, place)):
                _rename_directory(os.path.join(attempt.path, directory), os.path.join(target, place))
        _native.sync_paths([target])
        named = dataclasses.replace(record, checkpointables={**kept, **moved})
        replace_record(target, named, attempt.id, version)
    except BaseException:
        _take_out(attempt, zip(places, own, strict=True))
        raise


def _present(target: str) -> tuple[int, list[str], storage.Identity | None]:
    """Generation of the checkpoint that is overwritten, the directories that its record names, and the
    version of the record.

    One whose record cannot be read is overwritten like any other. Nothing then says what was its own, so
    its data stay until this process has ended and `orphans` finds them.
    """
    try:
        record, version = read_version(target)
    except (Corrupt, Unsupported):
        return 0, [], None
    return record.generation, [directory for directory, _ in record.checkpointables.values()], version


def _take_out(attempt: Attempt, directories: Iterable[tuple[str, str]]) -> None:
    """Moves directories that the target's record does not name into the attempt, to be removed with it.

    Each is given with its name there. What cannot be moved stays as an orphan; that must not hide how the
    overwrite itself ended.
    """
    try:
        record = read_record(attempt.target)
        named = {directory for directory, _ in record.checkpointables.values()}
        for directory, name in directories:
            source = os.path.join(attempt.target, directory)
            if directory not in named and storage.is_there(source):
                storage.renames(source).over(source, os.path.join(attempt.path, name), "remove", source)
    except WaystationError as error:
        _log.warning("data that '%s' does not need any more could not be removed: %s", attempt.target, error)


def publish_part(attempt: Attempt, part: records.LocalPart) -> None:
    """Commits a prepared part of a transaction, also one that another process has left behind.

    The attempt's directory holds afterwards what was replaced: see `remove_replaced`.
    """
    attempt.seal()
    _native.sync_paths([attempt.path])
    if part.replaces is None:
        publish_new(attempt)
    else:
        # Of a process that was killed while it replaced it.
        storage.remove_file(os.path.join(attempt.target, storage.names.attempt(names.RECORD, attempt.id)))
        # What has begun to move in can only go on so: a swap would make what is left a checkpoint.
        publish = publish_over if _is_whole(attempt) else replace_in_place
        publish(attempt)


def _is_whole(attempt: Attempt) -> bool:
    """Whether everything that its record names is in the attempt's directory."""
    named = read_record(attempt.path).checkpointables.values()
    return all(storage.is_there(os.path.join(attempt.path, directory)) for directory, _ in named)


def remove_replaced(attempt: Attempt) -> None:
    """Removes what an overwrite replaced. The commit has succeeded, so the save does not fail by this."""
    try:
        storage.remove_tree(attempt.path)
    except WaystationError as error:
        _log.warning("what '%s' replaced could not be removed: %s", attempt.target, error)


def swap_and_remove(attempt: Attempt, act: str) -> None:
    """Puts an attempt in the place of a checkpoint in one act, and removes that.

    Args:
        attempt: It.
        act: What the caller is to do to a new path instead, for the error: `save` or `copy`.

    Raises:
        Unsupported: The file system cannot do that.
    """
    try:
        swap(attempt)
    except Unsupported as error:
        raise Unsupported(
            f"this file system cannot swap '{attempt.target}' with a new checkpoint in one act; {act} to a "
            "new path, and delete the old one",
            path=attempt.target,
        ) from error
    remove_replaced(attempt)


def replace_record(
    target: str, record: records.CheckpointRecord, attempt_id: str, version: storage.Identity | None
) -> None:
    """Publishes a new generation of a checkpoint's record, atomically and durably.

    Raises:
        Conflict: The record is not the given version any more.
    """
    path = os.path.join(target, names.RECORD)
    storage.of(target).replace(path, record.encode(), attempt_id, expected=version)


def withdraw(target: str, attempt_id: str, *, created_ns: int | None = None) -> None:
    """Removes a checkpoint: it is gone in one act, whatever happens to the removal of its files.

    Args:
        target: The checkpoint.
        attempt_id: Names what is left of it, until its files have been removed.
        created_ns: When the version was committed that is to go; None for whatever is there, and for a
            checkpoint of another layout, whose versions nothing tells apart.

    Raises:
        Conflict: Another version has taken its place; that stays.
    """
    if storage.of(target).renames is None:
        in_store.withdraw(target, created_ns=created_ns)
        return
    parent, name = os.path.split(target)
    grave = os.path.join(parent, storage.names.attempt(name, attempt_id))
    with _judged(target, created_ns):
        storage.renames(target).over(target, grave, "delete", target)
    _native.sync_paths([parent])
    storage.remove_tree(grave)


@contextlib.contextmanager
def _judged(target: str, created_ns: int | None) -> Iterator[None]:
    """Keeps others from replacing a checkpoint within the block, which is of the version that was judged."""
    if created_ns is None or not has_record(target):
        yield
        return
    with locked(target):
        in_store.require_judged(target, read_record_file(target), created_ns)
        yield


def withdraw_checkpointable(target: str, name: str, attempt_id: str) -> None:
    """Removes one of several checkpointables of a checkpoint: a new generation of the record, which does not
    name it, is the act; it says as well who takes the files away.

    Raises:
        CheckpointableNotFound: It has gone meanwhile.
    """
    if storage.of(target).renames is None:
        in_store.withdraw_checkpointable(target, name, attempt_id)
        return
    with locked(target):
        record, version = read_version(target)
        remaining = dict(record.checkpointables)
        if name not in remaining:
            raise CheckpointableNotFound(
                f"checkpoint '{target}' has no checkpointable '{name}' any more", path=target
            )
        directory, _ = remaining.pop(name)
        present = {gone: remover for gone, remover in record.removed.items() if _is_in(target, gone)}
        shrunk = dataclasses.replace(
            record,
            generation=record.generation + 1,
            checkpointables=remaining,
            removed={**present, directory: attempt_id},
        )
        replace_record(target, shrunk, attempt_id, version)
    parent, checkpoint = os.path.split(target)
    grave = os.path.join(parent, storage.names.attempt(checkpoint, attempt_id))
    removed = os.path.join(target, directory)
    storage.renames(target).over(removed, grave, "remove", removed)
    storage.remove_tree(grave)


def _is_in(target: str, directory: str) -> bool:
    return storage.is_there(os.path.join(target, directory))


def locked(target: str) -> contextlib.AbstractContextManager[None]:
    """Keeps others from replacing a checkpoint or its record between a look at it and its replacement.

    Raises (on entry):
        Conflict: Another checkpoint came to stand at the path meanwhile, or another process holds the lock
            for too long.
    """
    return write_lock.held(target, if_replaced=False)


def read_record(directory: str, root: storage.Root | None = None) -> records.CheckpointRecord:
    """The record of the checkpoint at `directory` (opened beneath `root`)."""
    return records.CheckpointRecord.decode(
        read_record_file(directory, root), os.path.join(directory, names.RECORD)
    )


def read_version(directory: str) -> tuple[records.CheckpointRecord, storage.Identity]:
    """The record of the checkpoint at `directory`, and the version that it is, for who is to replace it."""
    path = os.path.join(directory, names.RECORD)
    content, version = storage.read_version(path, limit_bytes=records.RECORD_LIMIT_BYTES)
    return records.CheckpointRecord.decode(content, path), version


def has_record(directory: str) -> bool:
    """Whether a directory holds a record of Waystation: other programs name files `checkpoint.json`, too."""
    try:
        with storage.opened(os.path.join(directory, names.RECORD)) as file:
            is_sealed = file.status.kind == "file" and file.read(0, len(records.SEALED_START))
    except (NotFound, NotDirectory, PermissionDenied):
        return False  # what this process may not read is nothing that it would replace
    return is_sealed == records.SEALED_START


def read_record_file(directory: str, root: storage.Root | None = None) -> bytes:
    """The bytes of that record."""
    path = os.path.join(directory, names.RECORD)
    return storage.read_file(path, root, limit_bytes=records.RECORD_LIMIT_BYTES)


def _rename_directory(source: str, target: str) -> None:
    """A rename of a directory replaces an empty one in one act, but no file and none that holds anything."""
    try:
        storage.renames(target).over(source, target, "rename to")
    except (Conflict, NotDirectory) as error:
        raise _taken(target) from error


def _taken(target: str) -> Conflict:
    return Conflict(
        f"what came to be at '{target}' while the checkpoint was written stands in the way, and was left "
        "alone; save to another path, or look at what is there: overwrite=True replaces a checkpoint, and "
        "anything else has to be removed first",
        path=target,
    )
