"""Files that a handler makes of a checkpointable: found, made durable, vouched for, and verified again.

The layout knows nothing of what is in them. Invariants: only plain files and directories below the directory
that the handler was given are ever taken; each file is vouched for by the digest of its whole content; what
is not vouched for (a file that came later) is neither verified nor removed. A file is digested through a
mapping, so that its size does not matter to memory.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from waystation import _native
from waystation._errors import Corrupt, NotFound, Unsupported, from_os_error
from waystation.layouts.native.records import CheckpointableRecord, Digest


@dataclass(frozen=True, slots=True)
class HandlerFiles:
    """A checkpointable that consists of files that a handler made.

    Attributes:
        directory: Where they are.
        record: Its record.
    """

    directory: str
    record: CheckpointableRecord

    def paths(self) -> list[tuple[str, Digest]]:
        """Where each file is, and what vouches for it."""
        return [
            (os.path.join(self.directory, *name.split("/")), expected)
            for name, expected in self.record.files.items()
        ]

    def strays(self) -> list[str]:
        """Files in the directory that the record does not name."""
        if not os.path.isdir(self.directory):
            return []
        return [path for name, path in listed(self.directory).items() if name not in self.record.files]


_ADVICE = "restore another checkpoint, or see 'waystation verify'"


def listed(directory: str) -> dict[str, str]:
    """The files below a directory: their paths from there, divided by slashes, to where they are.

    Raises:
        Unsupported: There is something that cannot be vouched for: a symbolic link, a device, a name that
            is no text.
    """
    return {_name(path, directory): path for path, is_directory in _walked(directory) if not is_directory}


def below(directory: str) -> list[str]:
    """The paths of the files below a directory, whatever their names.

    Raises:
        Unsupported: There is something that cannot be vouched for, as for `listed`, but for names.
    """
    return [path for path, is_directory in _walked(directory) if not is_directory]


def to_sync(directory: str) -> list[str]:
    """All that has to be made durable for the files below a directory to be so: they and the directories."""
    return [*(path for path, _ in _walked(directory)), directory]


def sync_present(directory: str) -> None:
    """Makes what is below a directory durable, while others may still write, rename and remove there. What
    whoever calls this has written is among it."""
    for path in [path for path, _ in _walked(directory, may_vanish=True)]:
        with contextlib.suppress(NotFound):
            _native.sync_paths([path])
    _native.sync_paths([directory])


def digests(directory: str) -> dict[str, Digest]:
    """What vouches for the files below a directory."""
    return {name: digest(path) for name, path in sorted(listed(directory).items())}


def digest(path: str) -> Digest:
    """The digest of a whole file."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return Digest.of(b"")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return Digest(len(content), _native.crc64(content))
    except OSError as error:
        raise from_os_error(error, "read", path) from error


def verify(directory: str, expected: Mapping[str, Digest], names: Iterable[str] | None = None) -> None:
    """Compares files with what vouches for them.

    Args:
        directory: Where they are.
        expected: What vouches for all.
        names: Those to look at; by default all.

    Raises:
        Corrupt: A file is missing, or is not the one that was committed.
    """
    for name in expected if names is None else names:
        check(os.path.join(directory, *name.split("/")), expected[name])


def check(path: str, expected: Digest) -> None:
    """Compares a file with what vouches for it.

    Raises:
        Corrupt: It is missing, or is not the one that was committed.
    """
    try:
        nbytes = os.stat(path).st_size
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise Corrupt(f"a committed file is missing: '{path}'; {_ADVICE}", path=path) from error
        raise from_os_error(error, "look at", path) from error
    if nbytes != expected.nbytes:
        raise Corrupt(
            f"'{path}' has {nbytes} bytes where {expected.nbytes} were written; {_ADVICE}", path=path
        )
    if digest(path) != expected:
        raise Corrupt(
            f"'{path}' is not the file that was committed: its checksum differs; {_ADVICE}", path=path
        )


def _walked(directory: str, *, may_vanish: bool = False) -> Iterator[tuple[str, bool]]:
    """Paths below a directory, each directory after what is in it; and whether each is a directory."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError as error:
        if may_vanish and error.errno == errno.ENOENT:
            return
        raise from_os_error(error, "list", directory) from error
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except OSError as error:
            if may_vanish and error.errno == errno.ENOENT:
                continue
            raise from_os_error(error, "look at", entry.path) from error
        if stat.S_ISDIR(mode):
            yield from _walked(entry.path, may_vanish=may_vanish)
            yield entry.path, True
        elif stat.S_ISREG(mode):
            yield entry.path, False
        else:
            raise Unsupported(
                f"'{entry.path}' is neither a file nor a directory, so no checkpoint can vouch for it; "
                "a handler has to write files",
                path=entry.path,
            )


def _name(path: str, directory: str) -> str:
    name = os.path.relpath(path, directory)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise Unsupported(
            f"the name of {path!r} is no text, so that no record can hold it; a handler has to give other "
            "names to its files"
        ) from error
    if "\\" in name:
        raise Unsupported(
            f"the name of '{path}' has a backslash, which a record does not take; a handler has to give "
            "other names to its files",
            path=path,
        )
    return name
