"""Where the files of one execution stand: made once, and written anew in place, since creating costs more.

A `Place` is a directory in memory with one file, and one with two files and their index. What has to be
created (links, pipes, directories, files of other names) stands in a third one, which is emptied each time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from random import Random

from fuzz.open_path.documents import SHARDS

SINGLE = "single.safetensors"
INDEX = "model.safetensors.index.json"
CHECKSUMS = "checksums.waystation.json"

_ODD_NAMES = (
    *("model.safetensors", *SHARDS, INDEX, "other.safetensors.index.json", "m-00001-of-00001.safetensors"),
    *("model-00003-of-00002.safetensors", "model-00000-of-00002.safetensors", "weights.bin", "snapshots"),
    *("model-00001-of-99999999999999999999.safetensors", "a\nb.safetensors", ".safetensors", CHECKSUMS),
)


class _File:
    """A file that is written anew in place."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.content = b""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, content: bytes) -> None:
        os.pwrite(self._descriptor, content, 0)
        if len(content) < len(self.content):
            os.ftruncate(self._descriptor, len(content))
        self.content = content


class Place:
    """The files, below a directory."""

    def __init__(self, directory: str) -> None:
        self.set_directory = os.path.join(directory, "set")
        self.odd_directory = os.path.join(directory, "odd")
        os.mkdir(self.set_directory)
        self.single = _File(os.path.join(directory, SINGLE))
        self.shards = [_File(os.path.join(self.set_directory, name)) for name in SHARDS]
        self.index = _File(os.path.join(self.set_directory, INDEX))
        self._checksums = os.path.join(directory, CHECKSUMS)

    @property
    def files(self) -> list[_File]:
        """Those that are written anew in place."""
        return [self.single, *self.shards]

    @contextlib.contextmanager
    def checksums(self, content: bytes) -> Iterator[None]:
        """With checksums beside the single file."""
        with open(self._checksums, "wb") as file:
            file.write(content)
        try:
            yield
        finally:
            os.unlink(self._checksums)

    def make_odd(self, random: Random, contents: Sequence[bytes]) -> str:
        """A directory of files, links, pipes and directories, with names that mean something."""
        shutil.rmtree(self.odd_directory, ignore_errors=True)
        os.mkdir(self.odd_directory)
        for name in random.sample(_ODD_NAMES, random.randrange(1, 5)):
            _make_odd(random, os.path.join(self.odd_directory, name), random.choice(contents), self)
        return self.odd_directory


def _make_odd(random: Random, path: str, content: bytes, place: Place) -> None:
    how = random.randrange(12)
    if how == 0:
        os.mkfifo(path)
    elif how == 1:
        os.mkdir(path)
    elif how == 2:
        os.symlink(random.choice((place.single.path, "nowhere", ".", path, "/dev/zero")), path)
    elif how == 3:
        os.makedirs(os.path.join(path, "0123456789abcdef0123456789abcdef01234567"))
    else:
        with open(path, "wb") as file:
            file.write(content)
