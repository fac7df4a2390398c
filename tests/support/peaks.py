"""Measures the memory of a function in a process of its own, forked where the frameworks are imported.

The peak is that of the resident memory, so pages of files count if they are mapped, and not if they are read.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.programs import Place, Raised, running

from waystation import _native

_MMAP_THRESHOLD = -3  # of `mallopt`
_OWN_MAPPING_BYTES = 1 << 16


def in_own_process(function: Callable[..., Any], *arguments: Any, directory: Path) -> Any:
    """What a function of an importable module returns; `directory` is for a log."""
    with running(_call, function, arguments, count=1, framework="torch", directory=directory) as programs:
        (ended,) = programs.end()
    assert ended.exit_code == 0, ended.output
    assert not isinstance(ended.value, Raised), ended.output
    return ended.value


def _call(place: Place, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    del place
    # So that what is freed leaves the process.
    assert ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _OWN_MAPPING_BYTES) == 1
    return function(*arguments)


def status(field: str) -> int:
    """One of the sizes in `/proc/self/status`, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def give_back_free_memory() -> None:
    """Returns to the system what the process has freed."""
    gc.collect()
    _native.trim_arena()
    ctypes.CDLL(None).malloc_trim(0)


def begin_peak() -> int:
    """Has the kernel forget the peak (`VmHWM`); returns what is resident now."""
    give_back_free_memory()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return before
