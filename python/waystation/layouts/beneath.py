"""Files of a checkpoint, opened beneath a directory that is held open.

An overwrite gives the path of a checkpoint to another directory. What is opened beneath the directory that
was opened first is of one checkpoint, whatever has its path now. Functions take the whole path of a file,
which messages name, and `root`, the open directory that it is in; without one they go by the path.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from waystation import _native, _paths
from waystation._errors import InvalidInput, NotFound, WaystationError, from_os_error

_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory, and what it stood for when the directory was listed."""

    name: str
    _is_link: bool
    _is_directory: bool
    _is_own_directory: bool
    _is_regular: bool

    @classmethod
    def of(cls, entry: os.DirEntry[str]) -> Entry:
        """Asks while the descriptor of the directory is open, by which the system looks the name up."""
        is_directory, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
        return cls(entry.name, entry.is_symlink(), entry.is_dir(), is_directory, is_file)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a directory, or, unless that is not asked, a link to one."""
        return self._is_directory if follow_symlinks else self._is_own_directory

    def is_own_file(self) -> bool:
        """Whether it is a regular file itself, not a link to one."""
        return self._is_regular

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self._is_link


@contextmanager
def opened(path: str, root: _native.Directory | None, flags: int = 0) -> Iterator[int]:
    """A descriptor of what is at a path, to read from. Never waits for a named pipe.

    Raises:
        NotFound: Nothing is there.
        Unsupported: A symbolic link leads out of `root`.
    """
    descriptor = _open(path, root, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read(path: str, root: _native.Directory | None, offset: int, nbytes: int) -> bytes:
    """A range of a file; shorter only where the file ends."""
    parts = []
    with opened(path, root) as descriptor:
        while nbytes:  # the system may return less than there is
            try:
                part = os.pread(descriptor, nbytes, offset)
            except OSError as error:
                raise from_os_error(error, "read", path) from error
            if not part:
                break
            parts.append(part)
            offset, nbytes = offset + len(part), nbytes - len(part)
    return b"".join(parts)


def status(path: str, root: _native.Directory | None) -> os.stat_result | None:
    """What the system says of a path; None where nothing is.

    Raises:
        Unsupported: A symbolic link leads out of `root`.
    """
    try:
        if root is None:
            return _paths.status(path)
        with opened(path, root, os.O_PATH) as descriptor:
            return os.fstat(descriptor)
    except WaystationError as error:  # some of which are errors of the system, too
        if not is_absence(error):
            raise
        return None
    except OSError as error:
        raise from_os_error(error, "look at", path) from error


def is_there(path: str, root: _native.Directory | None) -> bool:
    """Whether anything is at a path, be it a symbolic link to nothing."""
    if root is None:
        return _paths.is_there(path)
    try:
        with opened(path, root, os.O_PATH | os.O_NOFOLLOW):
            return True
    except (NotFound, InvalidInput) as error:
        if not is_absence(error):
            raise
        return False


def entries(path: str, root: _native.Directory | None) -> list[Entry]:
    """What is in a directory, by name.

    Raises:
        NotFound: It is not there.
    """
    with opened(path, root, os.O_DIRECTORY) as descriptor:
        try:
            with os.scandir(descriptor) as found:
                listed = [Entry.of(entry) for entry in found]
            return sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            raise from_os_error(error, "look into", path) from error


def entries_or_none(path: str, root: _native.Directory | None) -> list[Entry]:
    """What is in a directory, none where it is not there."""
    try:
        return entries(path, root)
    except (NotFound, InvalidInput) as error:
        if not is_absence(error):
            raise
        return []


def check_links(path: str, root: _native.Directory) -> None:
    """Refuses symbolic links below a directory that lead out of `root`, for readers that follow them all.

    Raises:
        Unsupported: There is one.
    """
    for entry in entries(path, root):
        below = os.path.join(path, entry.name)
        if entry.is_symlink():
            status(below, root)
        elif entry.is_dir():
            check_links(below, root)


def files_below(path: str, root: _native.Directory | None) -> dict[str, int]:
    """The files below a directory with their lengths in bytes, by their paths from there."""
    found = {}
    for entry in entries(path, root):
        below = os.path.join(path, entry.name)
        if entry.is_dir(follow_symlinks=False):
            for name, nbytes in files_below(below, root).items():
                found[os.path.join(entry.name, name)] = nbytes
        elif (seen := status(below, root)) is not None:
            found[entry.name] = seen.st_size
    return found


def is_absence(error: WaystationError) -> bool:
    """Whether nothing is at a path, or a file has the place of one of its directories."""
    of_system = error.__cause__
    if isinstance(of_system, OSError):
        return of_system.errno in (errno.ENOENT, errno.ENOTDIR)
    return isinstance(error, NotFound) or error.context.get("errno") == str(errno.ENOTDIR)


def _open(path: str, root: _native.Directory | None, flags: int) -> int:
    if root is not None:
        return root.open(path, flags=flags)
    try:
        return os.open(path, _READING | flags)
    except OSError as error:
        raise from_os_error(error, "open", path) from error
