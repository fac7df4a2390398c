"""What processes leave behind when they die, so that a launch can end it as well. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[set[int]]:
    """What descendants leave behind when they die becomes a child of this process, so that it can be found
    and ended; yields the children that this process has already."""
    before = ctypes.c_int()
    _libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _libc.prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        yield set(_children())
    finally:
        _libc.prctl(_SET_CHILD_SUBREAPER, before.value)


def kill_adopted(strangers: set[int]) -> None:
    """Kills and reaps all children but these; each may leave children of its own, which are then ours."""
    while adopted := [child for child in _children() if child not in strangers]:
        for child in adopted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in adopted:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(entry.name))
    return found
