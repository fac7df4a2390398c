"""A temporary directory of this process, for handlers: they take a path also where no checkpoint has one.

Its name has the identity of the process, as names of attempts have. Failure sequence: a process is killed
and leaves one; the next process that makes one on the same machine finds that its process is dead, and
removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile

from waystation import _forks
from waystation._errors import from_os_error
from waystation.storage.attempts import is_dead, new_attempt_id

_PREFIX = "waystation-scratch."


class ScratchDirectory:
    """A directory that is made when it is first needed, and removed by the process that made it."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._owner = _forks.Owner()

    @property
    def path(self) -> str:
        """Where it is.

        Raises:
            PermissionDenied, Unavailable, DiskFull: It cannot be made.
        """
        if self._path is None:
            place = tempfile.gettempdir()
            _remove_dead(place)
            path = os.path.join(place, f"{_PREFIX}{new_attempt_id()}")
            try:
                os.mkdir(path, 0o700)
            except OSError as error:
                raise from_os_error(error, "make a directory in", place) from error
            self._path = path
        return self._path

    def below(self, name: str) -> str:
        """The path of a file or directory in it; the name may have directories, divided by `/`."""
        return os.path.join(self.path, *name.split("/"))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file in it, for a program that reads nothing but files.

        Raises:
            PermissionDenied, Unavailable, DiskFull: It cannot be written.
        """
        path = self.below(name)
        try:
            with open(path, "wb") as file:
                file.write(content)
        except OSError as error:
            raise from_os_error(error, "write", path) from error

    def remove(self) -> None:
        """Removes it with all that is in it; once is enough."""
        if self._path is not None and self._owner.is_here:
            shutil.rmtree(self._path, ignore_errors=True)


def _remove_dead(place: str) -> None:
    """Removes what killed processes of this user have left."""
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            path = os.path.join(place, name)
            if name.startswith(_PREFIX) and is_dead(name.removeprefix(_PREFIX), path, {}) and _is_own(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_own(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
