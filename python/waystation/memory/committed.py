"""Whether memory has ever had a committed step of a sequence, remembered beside the checkpoints.

Memory itself cannot tell: where all of it is lost, nothing is left that remembers. So a small file says it,
written once by each program, after its first commit; the primary alone reads and writes it. What cannot be
written is not remembered, and what cannot be read counts as if something had been committed: a program that
begins from nothing by mistake overwrites what there was.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from waystation.memory.versions import Version

FILE_NAME = "memory-committed.json"
_FORMAT_VERSION = 1


class CommittedRecord:
    """The record of one directory of checkpoints.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FILE_NAME
        self._is_noted = False

    def read(self) -> Version | None:
        """A version that was committed; None if none ever was, as far as is known."""
        try:
            record = json.loads(self._path.read_text())
            return Version(int(record["epoch"]), int(record["step"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            return Version(0, 0)

    def note(self, version: Version) -> None:
        """A version is committed; the first of this program is written down."""
        if self._is_noted:
            return
        self._is_noted = True
        record = {"version": _FORMAT_VERSION, "epoch": version.epoch, "step": version.step}
        written = self._path.with_name(f"{FILE_NAME}.{os.getpid()}")
        with contextlib.suppress(OSError):
            written.write_text(json.dumps(record))
            written.replace(self._path)

    def forget(self) -> None:
        """The program has deleted whatever memory had."""
        self._is_noted = False
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
