"""Paths as users give them, and the names in directories."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from waystation._errors import InvalidInput, UnusablePath, WrongType, from_os_error

T = TypeVar("T")


def absolute(path: object) -> str:
    """The absolute form of a path on a mounted file system; symbolic links stay as they are.

    Raises:
        WrongType: It is no string and no `os.PathLike`.
        InvalidInput: It is a URL; UnusablePath: it is empty or bytes, holds a NUL, or is not UTF-8.
    """
    if not isinstance(path, str | os.PathLike):
        raise WrongType(f"a path must be a string or os.PathLike, not {type(path).__name__}")
    text: object = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise UnusablePath(f"{text!r} is not a usable path")
    if "://" in text:
        raise InvalidInput(
            f"'{text}' is a URL; this version knows paths of mounted file systems only", path=text
        )
    whole = os.path.abspath(os.path.expanduser(text))
    try:
        whole.encode()
    except UnicodeEncodeError as error:
        raise UnusablePath(
            f"{whole!r} is not a usable path: it is not UTF-8; rename what has such a name, or give another "
            "path"
        ) from error
    return whole


def status(path: str | os.PathLike[str], *, follow_symlinks: bool = True) -> os.stat_result | None:
    """What the system says of a path; None where nothing is.

    `os.path.exists` and the like take any error for absence: also that of a file system that does not answer,
    or of a directory that must not be looked into.

    Raises:
        PermissionDenied, Unavailable: It cannot be told. (UnusablePath: links go in a circle.)
    """
    try:
        return os.stat(path, follow_symlinks=follow_symlinks)
    except OSError as error:
        # Of a name that is too long no file system has anything.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        raise from_os_error(error, "look at", os.fspath(path)) from error


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether anything is at a path, be it a link to nothing; raises as `status` does."""
    return status(path, follow_symlinks=False) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is at a path, or a link to one; raises as `status` does."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is at a path, or a link to one; raises as `status` does."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def list_directory(path: str | os.PathLike[str] | int) -> list[str]:
    """`os.listdir`, which by itself fails where a signal comes while a file system opens the directory."""
    return _uninterrupted(lambda: os.listdir(path))


def scan_directory(path: str | os.PathLike[str]) -> os._ScandirIterator[str]:
    """`os.scandir`, in the same way."""
    return _uninterrupted(lambda: os.scandir(path))


def _uninterrupted(call: Callable[[], T]) -> T:
    # Python tries calls again that a signal has interrupted, but for those that open directories.
    while True:
        try:
            return call()
        except InterruptedError:
            continue
