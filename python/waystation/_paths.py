"""Paths as users give them, and the names in directories."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from waystation._errors import InvalidInput, UnusablePath, WrongType

T = TypeVar("T")


def absolute(path: object) -> str:
    """The absolute form of a path on a mounted file system; symbolic links stay as they are.

    Raises:
        WrongType: It is no string and no `os.PathLike`.
        InvalidInput: It is a URL; UnusablePath: it is empty or bytes, holds a NUL, or is not UTF-8.
    """
    if not isinstance(path, str | os.PathLike):
        raise WrongType(f"a path is a string or os.PathLike, not {type(path).__name__}")
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
