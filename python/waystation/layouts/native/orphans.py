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

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from waystation import _native
from waystation._errors import WaystationError, from_os_error
from waystation._paths import list_directory
from waystation.layouts.native import attempts, commit, names
from waystation.layouts.native.attempts import Leftover
from waystation.layouts.native.records import RECORD_LIMIT_BYTES, CheckpointableRecord

_log = logging.getLogger("waystation")


def orphans(target: str) -> list[Leftover]:
    """The orphans inside of a checkpoint; none where there is no checkpoint that can be read."""
    with _opened(target) as directory:
        return [] if directory is None else _find(target, directory)


def remove(target: str, wanted: Callable[[Leftover], bool]) -> list[str]:
    """Removes the orphans in a checkpoint that are `wanted`, judged anew; returns their paths."""
    removed = []
    with _opened(target) as directory:
        for orphan in [] if directory is None else _find(target, directory):
            if wanted(orphan):
                _remove(orphan, target, directory)
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


@contextmanager
def _opened(target: str) -> Iterator[int | None]:
    """The directory of a checkpoint, or None."""
    try:
        directory = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise from_os_error(error, "open", target) from error
        yield None
        return
    try:
        yield directory
    finally:
        os.close(directory)


def _find(target: str, directory: int) -> list[Leftover]:
    if not os.access(names.RECORD, os.F_OK, dir_fd=directory):
        return []
    here = f"/proc/self/fd/{directory}"
    candidates = [name for name in sorted(list_directory(directory)) if _is_checkpointable(directory, name)]
    movers = {name: names.mover(name) for name in candidates}
    deaths = {name: _describe(target, name, mover) for name, mover in movers.items() if mover}
    try:
        record = commit.read_record(here)
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


def _is_checkpointable(directory: int, name: str) -> bool:
    """Whether an entry is the directory of a checkpointable, as a save makes them."""
    handled = f"{name}/{names.HANDLED_RECORD}"
    is_handled = os.access(handled, os.F_OK, dir_fd=directory, follow_symlinks=False)
    path = handled if is_handled else f"{name}/{names.CHECKPOINTABLE_RECORD}"
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            return False
        if not stat.S_ISREG(os.stat(path, dir_fd=directory, follow_symlinks=False).st_mode):
            return False
        whole = f"/proc/self/fd/{directory}/{path}"
        (data,) = _native.read_small_files([whole], limit_bytes=RECORD_LIMIT_BYTES)
        CheckpointableRecord.decode(data, whole)
    except (OSError, WaystationError):
        return False
    return True


def _describe(target: str, name: str, attempt_id: str) -> Leftover:
    """By its real path; moving data in or out changes the checkpoint's directory, a sign of life."""
    path = os.path.join(target, name)
    return attempts.describe(path, os.path.basename(target), "overwrite", attempt_id, signs=[target])


def _remove(orphan: Leftover, target: str, directory: int | None) -> None:
    parent, name = os.path.split(target)
    grave = os.path.join(parent, names.attempt(name, attempts.new_attempt_id()))
    try:
        os.rename(os.path.basename(orphan.path), grave, src_dir_fd=directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, "remove", orphan.path) from error
    attempts.remove_tree(grave)
