"""Whether processes that load a model together share a page cache, which then carries it from one to another.

What several processes need can be read by one and sent to the others. Where all are on the CPUs of one
machine that costs more than what it saves: sending copies every byte several times, and the page cache copies
it once, to where it stays. So each process reads all that it needs through the page cache, and begins with
another part of the files: what one has read from the disk, the others find cached. Invariants: all processes
come to the same answer from what all of them say; only speed depends on it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from waystation import _processes
from waystation._options import Options
from waystation.safetensors.headers import Header

_MEMORY = Path("/proc/meminfo")
_AVAILABLE = "MemAvailable:"


class View(NamedTuple):
    """What one process says.

    Attributes:
        kernel: Which kernel it runs on, empty where that cannot be told. Machines that are copies of each
            other may say the same; then each reads from its own disk.
        files: What tells the files that it has opened from others.
        is_able: Whether it can read through the page cache, and its arrays stay in the memory of the machine.
        available_bytes: Memory that is still to be had.
    """

    kernel: str
    files: str
    is_able: bool
    available_bytes: int

    @classmethod
    def of(cls, headers: Sequence[Header], options: Options, *, is_on_host: bool) -> View:
        """That of this process, which is to read these files to its own memory or to a device."""
        is_able = is_on_host and options.engine.read_mode in (None, "buffered")
        files = hashlib.sha256(repr([header.identity for header in headers]).encode()).hexdigest()
        return cls(_kernel(), files, is_able, _available_bytes())


def share_page_cache(views: Sequence[View], needed_bytes: int) -> bool:
    """Whether processes with these views should read through the page cache.

    Args:
        views: What all of them say.
        needed_bytes: What their arrays and the cached files take together. With less memory the page cache
            would forget what the others have not read yet.
    """
    first = views[0]
    return (
        first.kernel != ""
        and all(view.is_able for view in views)
        and all((view.kernel, view.files) == (first.kernel, first.files) for view in views)
        and min(view.available_bytes for view in views) >= needed_bytes
    )


def _kernel() -> str:
    try:
        return _processes.boot_id()
    except OSError:
        return ""


def _available_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith(_AVAILABLE):
                return int(line.split()[1]) << 10
    return 0
