"""A temporary directory of this process, for handlers: they take a path also where no checkpoint has one."""

from __future__ import annotations

import os
import shutil
import tempfile

from waystation import _forks
from waystation._errors import from_os_error


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
            try:
                self._path = tempfile.mkdtemp(prefix="waystation-")
            except OSError as error:
                raise from_os_error(error, "make a directory in", tempfile.gettempdir()) from error
        return self._path

    def below(self, name: str) -> str:
        """The path of a file or directory in it; the name may have directories, divided by `/`."""
        return os.path.join(self.path, *name.split("/"))

    def remove(self) -> None:
        """Removes it with all that is in it; once is enough."""
        if self._path is not None and self._owner.is_here:
            shutil.rmtree(self._path, ignore_errors=True)
