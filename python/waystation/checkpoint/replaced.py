"""Loads that begin again where the checkpoint was replaced while they read it.

A load opens files by path. An overwrite that commits between two of these openings gives it files of two
checkpoints: their checksums differ, or a file has gone. Such a failure says nothing of the checkpoint that is
there now. Programs of several processes do not begin again: their rounds have ended with the failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from waystation._errors import Corrupt, InvalidLayoutError, NotFound, Unavailable
from waystation._options import Options
from waystation.checkpoint.sessions import process_count
from waystation.layouts.native import names

T = TypeVar("T")

_MOST_ATTEMPTS = 50


def load_what_is_there(target: str, options: Options, load: Callable[[], T]) -> T:
    """`read_what_is_there` where the load is of one process; in a program of several, one attempt."""
    return load() if process_count(options) > 1 else read_what_is_there(target, load)


def read_what_is_there(target: str, load: Callable[[], T]) -> T:
    """Calls `load` until it succeeds, or the checkpoint was not replaced while it failed.

    Raises:
        Unavailable: The checkpoint was replaced during every attempt.
    """
    for _ in range(_MOST_ATTEMPTS):
        before = _identity(target)
        try:
            return load()
        except (Corrupt, NotFound, InvalidLayoutError) as error:
            if before == _identity(target):
                raise
            failure = error
    raise Unavailable(
        f"checkpoint '{target}' was replaced during each of {_MOST_ATTEMPTS} attempts to load it; save to it "
        "less often, or save each step to a path of its own",
        path=target,
    ) from failure


def _identity(target: str) -> list[tuple[int, int, int] | None]:
    """What differs between two checkpoints at one path; the time, since inode numbers are used again."""
    return [_identity_of_file(path) for path in (target, os.path.join(target, names.RECORD))]


def _identity_of_file(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns
