"""Where the values of keys are: metadata and chunks of arrays, as extents of files.

Without OCDBT every key is a file of its own. Readers above know only this protocol, so that chunks are read
alike wherever they lie.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from waystation import storage
from waystation.layouts.native.read_job import ReadFile
from waystation.layouts.orbax.checksums import FileChecksums


@dataclass(frozen=True, slots=True)
class Value:
    """Where the value of a key is.

    Attributes:
        path: The file.
        offset: Of the first byte.
        nbytes: How many.
        file_bytes: Of the file.
        content: The value itself, where it is in no file; then there is only this and `nbytes`.
    """

    path: str
    offset: int
    nbytes: int
    file_bytes: int
    content: bytes | None = None

    @classmethod
    def of_content(cls, content: bytes) -> Value:
        """A value that is in memory."""
        return cls("", 0, len(content), 0, content)


class Files:
    """The files that the records of a plan name by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lengths: list[int] = []

    def number(self, value: Value) -> int:
        """The number of the file of a value."""
        number = self._numbers.setdefault(value.path, len(self._lengths))
        if number == len(self._lengths):
            self._lengths.append(value.file_bytes)
        return number

    def listed(self, checksums: FileChecksums | None) -> list[ReadFile]:
        """As `_native.start_read` takes them, with their checksums if there are any.

        Raises:
            Corrupt: A file is not one that was saved.
        """
        files = list(zip(self._numbers, self._lengths, strict=True))
        if checksums is None:
            return [(path, nbytes, None) for path, nbytes in files]
        blocks = checksums.blocks(files)
        return [(path, nbytes, own) for (path, nbytes), own in zip(files, blocks, strict=True)]


class Values(Protocol):
    """The values of a checkpointable."""

    def find(self, keys: Sequence[str]) -> list[Value | None]:
        """Where the value of each key is; None for one that is not there.

        Raises:
            Corrupt: What tells that is damaged.
        """
        ...

    def where(self, key: str) -> str:
        """What to call the place of a key in messages."""
        ...


class FileValues:
    """Every key is a file in the directory of the checkpointable."""

    def __init__(self, directory: str, root: storage.Root | None = None) -> None:
        self._directory = directory
        self._root = root

    def find(self, keys: Sequence[str]) -> list[Value | None]:
        """Where the files are."""
        return [_look_at(self.where(key), self._root) for key in keys]

    def where(self, key: str) -> str:
        """The path of the file."""
        return os.path.join(self._directory, key)


def _look_at(path: str, root: storage.Root | None) -> Value | None:
    status = storage.status(path, root)
    return None if status is None else Value(path, 0, status.nbytes, status.nbytes)
