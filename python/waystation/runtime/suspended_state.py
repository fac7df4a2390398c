"""The directories in which arrays of suspended clients are, on this machine: made, and removed again.

There is one in host memory, on a tmpfs, and one on disk. Both are this user's alone, and have the identity of
this process in their names: what a process has left that was killed, a later one removes when it makes its
own. No byte of an array is read or written here: hosts do that.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass

from waystation._errors import InvalidInput, from_os_error
from waystation.runtime.controller.suspensions import SuspendedStatePlaces
from waystation.storage.attempts import is_dead, new_attempt_id

MEMORY = "/dev/shm"
MEMORY_BYTES = 1 << 30
_PREFIX = "waystation-suspended-"


@dataclass(frozen=True, slots=True)
class KeepSuspended:
    """Where arrays of suspended clients are kept.

    Attributes:
        memory: A directory on a tmpfs, which all hosts of the cluster reach.
        memory_bytes: The most that they take there.
        directory: Another directory that all hosts reach, for what has no room there.
    """

    memory: str = MEMORY
    memory_bytes: int = MEMORY_BYTES
    directory: str | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise InvalidInput(
                f"suspended arrays may take 0 bytes of memory or more, not {self.memory_bytes}"
            )


class SuspendedStateDirectories:
    """See above.

    Attributes:
        wanted: Where they are to be, from now on.
    """

    def __init__(self) -> None:
        self.wanted: KeepSuspended = KeepSuspended()
        self._made: list[str] = []
        self._places: dict[KeepSuspended, SuspendedStatePlaces] = {}

    def places(self) -> SuspendedStatePlaces:
        """The directories as they are wanted now; makes them where they are wanted for the first time.

        Raises:
            WaystationError: One cannot be made.
        """
        wanted = self.wanted
        if wanted not in self._places:
            memory: str | None = None
            if wanted.memory_bytes and (os.path.isdir(wanted.memory) or wanted.memory != MEMORY):
                memory = self._make(wanted.memory)
            directory = self._make(wanted.directory or tempfile.gettempdir())
            self._places[wanted] = SuspendedStatePlaces(memory, wanted.memory_bytes, directory)
        return self._places[wanted]

    def keep(self, wanted: KeepSuspended) -> None:
        """Says where they are to be from now on; whoever asks for it hears where that cannot be.

        Raises:
            WaystationError: One cannot be made.
        """
        self.wanted = wanted
        self.places()

    def remove(self, path: str) -> None:
        """Removes one suspended state; what is gone already is no error."""
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Removes everything."""
        made, self._made = self._made, []
        for path in made:
            self.remove(path)

    def _make(self, parent: str) -> str:
        try:
            for name in os.listdir(parent):
                found = os.path.join(parent, name)
                if name.startswith(_PREFIX) and is_dead(name.removeprefix(_PREFIX), found, {}):
                    self.remove(found)
            path = os.path.join(parent, f"{_PREFIX}{new_attempt_id()}")
            os.mkdir(path, 0o700)
        except OSError as error:
            raise from_os_error(error, "make a directory for suspended clients in", parent) from error
        self._made.append(path)
        return path
