"""Which versions were loaded to no avail, remembered across restarts of the program.

A version that a program loads, and then ends before it has saved anything newer, may be what makes it end.
After so many such loads it is passed over. That stands in a small file beside the checkpoints, which the
primary alone reads and writes; it is advice: what cannot be read or written counts as if it were not there.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from waystation.memory.versions import Version

MOST_FRUITLESS_RESTORES = 2
FILE_NAME = "memory-restores.json"


class Restores:
    """The record of one directory of checkpoints.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FILE_NAME

    def spent(self) -> list[Version]:
        """The versions that are not to be loaded any more."""
        return [version for version, count in self._read().items() if count >= MOST_FRUITLESS_RESTORES]

    def note(self, version: Version) -> None:
        """A version is about to be loaded."""
        counts = self._read()
        counts[version] = counts.get(version, 0) + 1
        self._write(counts)

    def forget(self) -> None:
        """Something newer was saved: whatever was loaded has served."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self) -> dict[Version, int]:
        try:
            entries = json.loads(self._path.read_text())
            return {Version(int(epoch), int(step)): int(count) for epoch, step, count in entries}
        except (OSError, ValueError, TypeError):
            return {}

    def _write(self, counts: dict[Version, int]) -> None:
        text = json.dumps([[version.epoch, version.step, count] for version, count in counts.items()])
        written = self._path.with_name(f"{FILE_NAME}.{os.getpid()}")
        with contextlib.suppress(OSError):
            written.write_text(text)
            written.replace(self._path)
