"""The lock that a process holds while it replaces what is in a directory, so that one process at a time does.

The lock is of the directory itself, not of its path: it moves with the directory where that is renamed. It
takes one of two forms, and all processes choose the same one for a directory:

- A file system of one machine: `flock` of the directory. The kernel ends it with its process.
- Any other file system, where `flock` may be refused, or may exclude processes of one machine only: a file
  in the directory, `.waystation-writer`, which is created only where there is none. Its owner renews it. That
  of a process that is proven dead (`attempts.is_dead`) is removed by whoever finds it; a second file, created
  in the same way, says who does that, so that nobody removes the file of the next owner instead.

Failure sequence: a process that is killed with the lock leaves what it was replacing as its own order of
steps says, and the lock ends as told above. If a process is killed while it removes the file of another dead
one, the second file stays, and the error of those who wait for the lock names it.

Limits: writers on a server and on its clients choose different forms, and nothing excludes them from each
other; a process that is stopped for longer than a file goes without being renewed loses the lock unnoticed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waystation import _forks
from waystation._errors import Conflict, from_os_error
from waystation.storage import attempts, names, signs_of_life

_log = logging.getLogger("waystation")

WAIT_S = 60.0

_POLL_S = 0.005
_REFUSED = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextlib.contextmanager
def held(directory: str, *, if_replaced: bool = True) -> Iterator[None]:
    """Holds the lock of the directory at a path.

    Args:
        directory: The path.
        if_replaced: Whether to take the lock of another directory that came to stand there meanwhile.

    Raises:
        NotFound: There is no directory.
        Conflict: Another process holds the lock for longer than `WAIT_S`, or the directory was replaced.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        lock = _Lock(directory)
        try:
            lock.take(deadline)
            if lock.is_current():
                yield
                return
        finally:
            lock.release()
        if not if_replaced:
            raise Conflict(f"'{directory}' was replaced meanwhile; look at it again", path=directory)


class _Lock:
    """The lock of the directory that was at a path when this was made."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        try:
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, "open", directory) from error
        self._owner = _forks.Owner()
        self._file: _File | None = None
        if signs_of_life.is_shared(directory):
            self._file = _File(self._place())
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `_forks.Watched`: with an open copy of the descriptor, a child would hold the lock as well."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _place(self) -> str:
        """A path of the directory that stays right where it is renamed; its own path without /proc."""
        held = f"/proc/self/fd/{self._descriptor}"
        return held if os.path.isdir(held) else self._directory

    def is_current(self) -> bool:
        """Whether the directory is still the one at its path."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._directory))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise from_os_error(error, "examine", self._directory) from error

    def take(self, deadline: float) -> None:
        """Waits for the lock, until a time of the monotonic clock."""
        while not self._try():
            if time.monotonic() >= deadline:
                raise self._conflict()
            time.sleep(_POLL_S)

    def _try(self) -> bool:
        try:
            if self._file is None:
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError as error:
                    if error.errno not in _REFUSED:
                        raise
                    self._file = _File(self._place())
                else:
                    return True
            return self._file.make()
        except OSError as error:
            raise from_os_error(error, "lock", self._directory) from error

    def release(self) -> None:
        """Gives the lock up, if it is held. Once is enough."""
        if not self._owner.is_here or self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if self._file is None:
                # A copy of the descriptor in a child must not keep the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            else:
                self._file.remove()
        except OSError as error:
            # What was done under the lock has ended by itself.
            _log.warning("the lock of '%s' could not be given up: %s", self._directory, error)
        finally:
            os.close(descriptor)

    def _conflict(self) -> Conflict:
        who, advice = "another process", ""
        process: Any = None
        if self._file is None:
            process = _holder_of_flock(self._descriptor)
            if process is not None:
                who = f"process {process}"
        else:
            owner = self._file.owner()
            process = owner.get("process")
            if process is not None:
                who = f"process {process} on {owner.get('host')}"
            advice = (
                "; if no such process runs, its lock ends by itself within "
                f"{signs_of_life.EXPIRES_S / 60:g} minutes{self._file.advice(self._directory)}"
            )
        known = {} if process is None else {"process": process}
        return Conflict(
            f"{who} has been replacing what is in '{self._directory}' for {WAIT_S:g} s; nothing was changed; "
            f"try again when it has ended{advice}",
            path=self._directory,
            **known,
        )


def _holder_of_flock(descriptor: int) -> int | None:
    """The process that holds the lock of an open directory, if the kernel tells."""
    found = os.fstat(descriptor)
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5] == inode and int(words[4]) > 0:
                return int(words[4])
    return None


class _File:
    """The file in a directory that is its lock; `place` is a path of that directory."""

    def __init__(self, place: str) -> None:
        self._path = os.path.join(place, names.WRITER)
        self._removal = os.path.join(place, names.WRITER_REMOVAL)
        self._id = attempts.new_attempt_id()

    def make(self) -> bool:
        """Makes it; False if there is one. One of a dead process is removed."""
        if _create(self._path, self._id):
            signs_of_life.HEARTBEAT.begin(self, functools.partial(os.utime, self._path))
            return True
        if _is_dead(self._path) and _create(self._removal, self._id):
            try:
                if _is_dead(self._path):  # still: that of the next owner must stay
                    _unlink(self._path)
            finally:
                _unlink(self._removal)
        return False

    def remove(self) -> None:
        """Removes it, if this has made it: others may have taken it for that of a dead process meanwhile."""
        signs_of_life.HEARTBEAT.end(self)
        if self.owner().get("attempt") == self._id:
            _unlink(self._path)

    def owner(self) -> dict[str, Any]:
        """What its owner says of itself; empty if there is none."""
        return _owner(self._path)

    def advice(self, directory: str) -> str:
        """What to do where a process was killed while it removed the file of another."""
        if not os.path.lexists(self._removal):
            return ""
        return f", once you have removed '{os.path.join(directory, names.WRITER_REMOVAL)}'"


def _create(path: str, attempt_id: str) -> bool:
    """Creates a file with the record of this process; False if there is one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(attempts.owner_record() | {"attempt": attempt_id}, file)
    except BaseException:
        _unlink(path)
        raise
    return True


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _owner(path: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(Path(path).read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def _is_dead(path: str) -> bool:
    owner = _owner(path)
    if not owner:  # killed before it wrote its record, unless it has just begun to
        return signs_of_life.has_run_out(path)
    return attempts.is_dead(str(owner.get("attempt")), path, owner)
