"""The commit: the single atomic act that makes a checkpoint visible, and its undoing.

Everything an attempt wrote is durable before any of these is called. Failure sequence of a new
checkpoint: killed before the rename, there is none; after it, there is one (the parent's entry may
be lost with the power until it is synced, and then there is none). Of an overwrite: the names are
swapped in one act, so the old one stands until the new one does. Where a file system cannot swap,
the new data moves in beside the old and the record, a single file, is replaced by rename.
"""

from __future__ import annotations

import errno
import os

from waystation import _native
from waystation._errors import Conflict, Unsupported, from_os_error
from waystation.layouts.native import names, records
from waystation.layouts.native.attempts import Attempt, remove_tree


def publish_new(attempt: Attempt) -> None:
    """Makes the attempt the checkpoint, if the name is still free.

    Raises:
        Conflict: Something took the name meanwhile.
    """
    try:
        _native.rename_new(attempt.path, attempt.target)
    except Conflict as error:
        raise _taken(attempt.target) from error
    except Unsupported:
        _rename_directory(attempt.path, attempt.target)
    _native.sync_paths(attempt.directories_to_sync())


def publish_over(attempt: Attempt) -> None:
    """Makes the attempt the checkpoint in place of the present one, which is whole until then."""
    try:
        _native.rename_exchange(attempt.path, attempt.target)
    except Unsupported:
        replace_in_place(attempt)
        return
    _native.sync_paths(attempt.directories_to_sync())
    remove_tree(attempt.path)


def replace_in_place(attempt: Attempt) -> None:
    """`publish_over` for file systems that cannot swap names: the record's rename is the commit."""
    target = attempt.target
    present = read_record(target)
    prepared = read_record(attempt.path)
    moved: dict[str, tuple[str, records.Digest]] = {}
    for name, (directory, digest) in prepared.checkpointables.items():
        new_directory = f"{directory}-{attempt.id}"
        _rename_directory(os.path.join(attempt.path, directory), os.path.join(target, new_directory))
        moved[name] = (new_directory, digest)
    record = records.CheckpointRecord(
        present.generation + 1, moved, prepared.created_ns, prepared.custom_metadata
    )
    _native.sync_paths([target])
    replace_record(target, record, attempt.id)
    for directory, _ in present.checkpointables.values():
        remove_tree(os.path.join(target, directory))
    remove_tree(attempt.path)


def replace_record(target: str, record: records.CheckpointRecord, attempt_id: str) -> None:
    """Publishes a new generation of a checkpoint's record, atomically and durably."""
    final = os.path.join(target, names.RECORD)
    temporary = f"{final}{names.ATTEMPT_INFIX}{attempt_id}"
    _native.write_small_files([(temporary, record.encode())])
    try:
        os.replace(temporary, final)
    except OSError as error:
        raise from_os_error(error, "replace", final) from error
    _native.sync_paths([target])


def withdraw(target: str, attempt_id: str) -> None:
    """Removes a checkpoint: it is gone in one act, whatever happens to the removal of its files."""
    parent, name = os.path.split(target)
    grave = os.path.join(parent, names.attempt(name, attempt_id))
    try:
        os.rename(target, grave)
    except OSError as error:
        raise from_os_error(error, "delete", target) from error
    _native.sync_paths([parent])
    remove_tree(grave)


def read_record(directory: str) -> records.CheckpointRecord:
    """The record of the checkpoint at `directory`."""
    path = os.path.join(directory, names.RECORD)
    (data,) = _native.read_small_files([path], limit_bytes=RECORD_LIMIT_BYTES)
    return records.CheckpointRecord.decode(data, path)


RECORD_LIMIT_BYTES = 256 << 20


def _rename_directory(source: str, target: str) -> None:
    """rename(2) of a directory never replaces one that holds anything, nor a file."""
    try:
        os.rename(source, target)
    except (FileExistsError, NotADirectoryError) as error:
        raise _taken(target) from error
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise _taken(target) from error
        raise from_os_error(error, "rename to", target) from error


def _taken(target: str) -> Conflict:
    return Conflict(
        f"'{target}' appeared while the checkpoint was written; it was left alone, and this save is undone",
        path=target,
    )
