"""Orphans: data inside of a committed checkpoint that its record does not name, and their removal.

They are left where file systems cannot swap names (`commit.replace_in_place`): data that were moved in by
an overwrite that was killed before its commit (their name has the attempt's id), or that were to be moved
out by one killed right after it (then the record names directories of that attempt). And where the removal of
a checkpointable was killed after its commit (the record has the attempt's id). An orphan is dead when the
process of that attempt is, by the proof that `attempts` asks for.

Invariants: only a directory that holds a valid sealed record of a checkpointable is ever taken for one. The
death of an attempt is looked at before the record is read, as it could commit in between. Everything goes
through one open directory: the checkpoint may be overwritten or deleted meanwhile, and then another one
stands under its path. An orphan leaves in one rename, to a name that is an attempt's: killed while it is
removed, it is a dead attempt.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from waystation import storage
from waystation._errors import NotFound, WaystationError
from waystation.layouts.native import commit, names
from waystation.layouts.native.records import RECORD_LIMIT_BYTES, CheckpointableRecord
from waystation.storage import attempts
from waystation.storage.attempts import Leftover

_log = logging.getLogger("waystation")


def orphans(target: str) -> list[Leftover]:
    """The orphans inside of a checkpoint; none where there is no checkpoint that can be read."""
    root = _held(target)
    return [] if root is None else _find(root)


def remove(target: str, wanted: Callable[[Leftover], bool]) -> list[str]:
    """Removes the orphans in a checkpoint that are `wanted`, judged anew; returns their paths."""
    removed = []
    if (root := _held(target)) is not None:
        for orphan in filter(wanted, _find(root)):
            _remove(orphan, root)
            removed.append(orphan.path)
    return removed


def remove_dead(target: str) -> list[str]:
    """Removes what dead overwrites left inside of a checkpoint; returns the paths."""
    removed = attempts.remove_dead(target, names.RECORD)
    try:
        removed += remove(target, lambda orphan: orphan.is_over)
    except WaystationError as error:
        _log.warning("what an overwrite left in '%s' could not be removed: %s", target, error)
    return removed


def _held(target: str) -> storage.Root | None:
    """The directory of a checkpoint, held open; None where there is none, or a link to one."""
    found = storage.status(target, follow_links=False)
    if found is None or found.kind != "directory":
        return None
    try:
        return storage.of(target).hold(target)
    except WaystationError as error:
        if storage.is_absence(error):
            return None
        raise


def _find(root: storage.Root) -> list[Leftover]:
    target = root.path
    if not storage.is_there(os.path.join(target, names.RECORD), root):
        return []
    candidates = [entry.name for entry in storage.entries(target, root) if _is_checkpointable(entry, root)]
    movers = {name: names.mover(name) for name in candidates}
    deaths = {name: _describe(target, name, mover) for name, mover in movers.items() if mover}
    try:
        record = commit.read_record(target, root)
    except WaystationError:
        return []
    named = [name for name, _ in record.checkpointables.values()]
    committers = sorted({mover for mover in map(names.mover, named) if mover})
    found = []
    for name in candidates:
        if name in named:
            continue
        if name in record.removed:
            found.append(_describe(target, name, record.removed[name]))
        elif name in deaths:
            found.append(deaths[name])
        elif committers:
            # Whoever put the present data here has not taken these out: dead once all of them are.
            described = [_describe(target, name, committer) for committer in committers]
            found.append(min(described, key=lambda orphan: orphan.is_over))
    return found


def _is_checkpointable(entry: storage.Entry, root: storage.Root) -> bool:
    """Whether an entry is the directory of a checkpointable, as a save makes them."""
    directory = os.path.join(root.path, entry.name)
    try:
        if entry.kind != "directory":
            return False
        path = os.path.join(directory, names.HANDLED_RECORD)
        found = storage.status(path, root, follow_links=False)
        if found is None:
            path = os.path.join(directory, names.CHECKPOINTABLE_RECORD)
            found = storage.status(path, root, follow_links=False)
        if found is None or found.kind != "file":
            return False
        CheckpointableRecord.decode(storage.read_file(path, root, limit_bytes=RECORD_LIMIT_BYTES), path)
    except WaystationError:
        return False
    return True


def _describe(target: str, name: str, attempt_id: str) -> Leftover:
    """By its real path; moving data in or out changes the checkpoint's directory, a sign of life."""
    path = os.path.join(target, name)
    return attempts.describe(path, os.path.basename(target), "overwrite", attempt_id, signs=[target])


def _remove(orphan: Leftover, root: storage.Root) -> None:
    parent, name = os.path.split(root.path)
    grave = os.path.join(parent, storage.names.attempt(name, attempts.new_attempt_id()))
    try:
        storage.renames(grave).over(orphan.path, grave, "remove", orphan.path, root=root)
    except NotFound:
        return
    storage.remove_tree(grave)
