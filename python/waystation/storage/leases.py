"""Leases: who reads a checkpoint at present, so that nobody removes it meanwhile.

A reader puts a mark into the checkpoint's directory, a collector one that condemns the checkpoint. Each puts
its own first and then looks for the other's. So of a reader and a collector that come at the same time at
least one sees the other, and gives way: a reader takes another checkpoint, a collector leaves this one to the
next collection. A listing of steps meets nothing of this. Marks are no part of a checkpoint, and of any
layout: files of Orbax's checkpoints stand in directories, of which no mark is one.

A mark is put through a descriptor of the directory, and again where another directory has taken the place of
that meanwhile. An overwrite that swaps directories brings the marks of the old one along, as further links to
the same files: what the process that made a mark writes into it is seen in both directories. In the moment
between the swap and that, a look at the new directory misses a mark; so a collector leaves what somebody
overwrites to the next collection.

Each mark has the identity of its process in its name, as attempts have (`attempts`). The mark
of a process that provably no longer runs counts for nothing, and is removed. Of a process on another machine
that cannot be proved: its mark counts until it has shown no sign of life for `EXPIRES_S`; a reader shows one
each `HEARTBEAT_S`, from a thread that runs while it holds something. A process that takes its mark away says
so in it first, for another directory may have it, too.

What can go wrong, in order: a reader is killed: its lease is dead. A collector is killed between condemning
and removing: what it condemned stays, and its mark is dead. The directory cannot be written to by a reader:
then it reads without a lease, and is safe only from those who cannot write there either.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from waystation import _forks
from waystation._errors import PermissionDenied, from_os_error
from waystation.storage import names
from waystation.storage.attempts import (
    is_dead,
    is_of_this_system,
    leftovers,
    new_attempt_id,
    owner_record,
)
from waystation.storage.signs_of_life import HEARTBEAT, has_run_out

# How often a mark is put, or looked for, again because the checkpoint was replaced meanwhile.
_MAX_TRIES = 1000

LEASE, CONDEMNED = ".waystation-lease.", ".waystation-condemned."

_OVER = b'{"is_over": true}'
_MARK_LIMIT_BYTES = 64 << 10

_log = logging.getLogger("waystation")


def is_mark(name: str) -> bool:
    """Whether an entry of a checkpoint's directory is a mark, or the lock of a process that replaces it."""
    return _is_carried(name) or name.startswith(names.WRITER)


def _is_carried(name: str) -> bool:
    return name.startswith((LEASE, CONDEMNED))


def without_marks(entries: Iterable[str]) -> list[str]:
    """The entries of a checkpoint's directory, in order, that are no marks."""
    return sorted(name for name in entries if not is_mark(name))


def carry(source: str, target: str) -> None:
    """Has the marks of a checkpoint's directory stand in another one as well.

    Where the file system has no further links to a file, they stay behind: no save fails by that. Those in a
    directory that a symbolic link leads to are not of the link, which is all that a save replaces.
    """
    with contextlib.suppress(OSError):
        if os.path.islink(source):
            return
        for name in filter(_is_carried, os.listdir(source)):
            with contextlib.suppress(OSError):
                os.link(os.path.join(source, name), os.path.join(target, name), follow_symlinks=False)


class Leases:
    """The leases on the checkpoints of one directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[bool]:
        """Keeps the checkpoint of this name from being collected within the block.

        Yields:
            False if it is condemned already: then it must not be read.
        """
        mark = self._put(name, LEASE)
        try:
            if self._living(name, CONDEMNED):
                yield False
                return
            if mark is None:
                yield True
                return
            with HEARTBEAT.of(mark, mark.touch):
                yield True
        finally:
            if mark is not None:
                mark.remove()

    def is_held(self, name: str) -> bool:
        """Whether somebody reads the checkpoint of this name."""
        return self._living(name, LEASE)

    @contextlib.contextmanager
    def condemned(self, name: str) -> Iterator[bool]:
        """Condemns the checkpoint of this name within the block.

        Yields:
            False if somebody reads it, or overwrites it: then it must not be removed.
        """
        mark = self._put(name, CONDEMNED)
        try:
            # In this order: until an overwrite has brought all marks along, its attempt is to be seen.
            is_used = self._is_overwritten(name) or self.is_held(name)
            yield not is_used and (mark is None or mark.is_in_place())
        finally:
            if mark is not None:
                mark.remove()

    def _is_overwritten(self, name: str) -> bool:
        """Whether a process that may still run overwrites the checkpoint, or removes what it replaced."""
        attempts = leftovers(os.fspath(self._root), name)
        return any(attempt.is_running or not (attempt.is_over or attempt.has_run_out) for attempt in attempts)

    def _put(self, name: str, kind: str) -> _Mark | None:
        """Puts a mark; None if that cannot be, or there is no checkpoint."""
        checkpoint = self._root / name
        try:
            for _ in range(_MAX_TRIES):
                try:
                    directory = _opened(checkpoint)
                except (FileNotFoundError, NotADirectoryError):
                    return None  # it has been removed, as the caller will see
                with contextlib.suppress(FileNotFoundError):  # another directory took its place
                    mark = _Mark(checkpoint, directory, kind)
                    if mark.is_in_place():
                        return mark
                    mark.remove()
        except OSError as error:
            typed = from_os_error(error, "write the lease", os.fspath(checkpoint))
            if not isinstance(typed, PermissionDenied):  # which is how readers of others' checkpoints live
                _log.warning("checkpoint '%s' is used without a lease: %s", name, typed)
            return None
        _log.warning("checkpoint '%s' is used without a lease: it is replaced all the time", name)
        return None

    def _living(self, name: str, kind: str) -> bool:
        """Whether a process that may still run has put such a mark; those of dead ones are removed."""
        for _ in range(_MAX_TRIES):
            found = self._look(name, kind)
            if found is not None:
                return found
        return True  # marks came and went all the time

    def _look(self, name: str, kind: str) -> bool | None:
        """The same at one look; None if the marks changed meanwhile, or the checkpoint was replaced."""
        checkpoint = self._root / name
        try:
            directory = _opened(checkpoint)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise from_os_error(error, "open", os.fspath(checkpoint)) from error
        try:
            living = False
            for found in os.listdir(directory):
                if not found.startswith(kind):
                    continue
                is_over = _is_over(directory, found, found.removeprefix(kind), os.fspath(checkpoint))
                if is_over is None:
                    return None
                if is_over:
                    with contextlib.suppress(OSError):
                        os.unlink(found, dir_fd=directory)
                living = living or not is_over
            return living if _is_at(checkpoint, directory) else None
        except OSError as error:
            raise from_os_error(error, "list", os.fspath(checkpoint)) from error
        finally:
            os.close(directory)


def _opened(checkpoint: Path) -> int:
    return os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_at(checkpoint: Path, directory: int) -> bool:
    """Whether an open directory is still that of the checkpoint."""
    try:
        return os.path.samestat(os.fstat(directory), os.stat(checkpoint))
    except OSError:
        return False


class _Mark:
    """A mark of this process in the directory of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        directory: A descriptor of its directory, which is closed with the mark, or where that cannot be put.
        kind: What the mark says.

    Raises:
        OSError: It cannot be put; FileNotFoundError, if the directory has been removed.
    """

    def __init__(self, checkpoint: Path, directory: int, kind: str) -> None:
        self._owner = _forks.Owner()
        self._lock = threading.Lock()
        self._is_removed = False
        self._checkpoint = checkpoint
        self._directory = directory
        self._name = f"{kind}{new_attempt_id()}"
        with contextlib.ExitStack() as until_failure:
            until_failure.callback(os.close, directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._name, flags, 0o666, dir_fd=self._directory)
            until_failure.callback(os.close, self._file)
            until_failure.callback(os.unlink, self._name, dir_fd=self._directory)
            os.write(self._file, json.dumps(owner_record()).encode())
            until_failure.pop_all()

    def is_in_place(self) -> bool:
        """Whether the directory that it is in is still that of the checkpoint."""
        return _is_at(self._checkpoint, self._directory)

    def touch(self) -> None:
        """Shows that this process is alive."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_removed:
                os.utime(self._file)

    def remove(self) -> None:
        """Takes it away, also where an overwrite has carried it to. In a forked child it stays: it is that of
        the parent."""
        if self._owner.is_here:
            with self._lock:
                self._is_removed = True  # its descriptor may be that of another file from now on
            self._take_away()
        os.close(self._file)
        os.close(self._directory)

    def _take_away(self) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._file, _OVER, 0)
            os.ftruncate(self._file, len(_OVER))
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)
        with contextlib.suppress(OSError):
            os.unlink(self._checkpoint / self._name)


def _is_over(directory: int, name: str, identity: str, checkpoint: str) -> bool | None:
    """Whether the process that has put a mark is done with it, provably no longer runs, or is silent for too
    long; None if the mark has gone."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        try:
            content = os.read(file, _MARK_LIMIT_BYTES)
        finally:
            os.close(file)
    except FileNotFoundError:
        return None
    except OSError:
        return False
    if content == _OVER:
        return True
    try:
        owner = json.loads(content)
    except ValueError:
        owner = {}  # it is being written, or was never finished
    path = os.path.join(checkpoint, name)
    if is_dead(identity, path, owner if isinstance(owner, dict) else {}):
        return True
    return not is_of_this_system(identity) and has_run_out(path)
