"""Marks in a checkpoint's directory: files that say who reads the checkpoint, and who is about to remove it.

They are no part of the checkpoint, and of any layout: files of Orbax's checkpoints stand in directories, of
which no mark is one. What they mean, and who decides by them, is in `training/leases`.

Invariant: an overwrite that swaps directories brings the marks of the old one along, as further links to the
same files: so what whoever made a mark writes into it is seen in both directories.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from waystation.layouts.native import names

LEASE, CONDEMNED = ".waystation-lease.", ".waystation-condemned."


def is_mark(name: str) -> bool:
    """Whether an entry of a checkpoint's directory is a mark, or the lock of a process that replaces it."""
    return _is_carried(name) or name.startswith(names.WRITER)


def _is_carried(name: str) -> bool:
    return name.startswith((LEASE, CONDEMNED))


def without_marks(entries: Iterable[str]) -> list[str]:
    """The entries of a checkpoint's directory, in order, that are no marks."""
    return sorted(name for name in entries if not is_mark(name))


def carry(source: str, target: str) -> None:
    """Has the marks of a checkpoint's directory stand in another one as well.

    Where the file system has no further links to a file, they stay behind: no save fails by that.
    """
    with contextlib.suppress(OSError):
        for name in filter(_is_carried, os.listdir(source)):
            with contextlib.suppress(OSError):
                os.link(os.path.join(source, name), os.path.join(target, name), follow_symlinks=False)
