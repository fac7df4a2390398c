"""Which versions are not to be loaded, remembered across restarts of the program.

A version that a program loads, and then ends before it has saved anything newer, may be what makes it end.
After so many such loads it is passed over. So is what the program has deleted while the agents of several
hosts still keep it. That stands in a small file beside the checkpoints, which the primary alone reads and
writes; it is advice: what cannot be read or written counts as if it were not there.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from waystation.memory.versions import Version

MOST_FRUITLESS_RESTORES = 2
# Agents keep few versions, so that older ones than these are not there any more.
MOST_DELETED = 64
FILE_NAME = "memory-restores.json"


class Restores:
    """The record of one directory of checkpoints.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FILE_NAME

    def spent(self) -> list[Version]:
        """The versions that were loaded to no avail, and are not to be loaded any more."""
        return [
            version
            for version, count in self._read().items()
            if count is not None and count >= MOST_FRUITLESS_RESTORES
        ]

    def deleted(self) -> list[Version]:
        """The versions that the program has deleted."""
        return [version for version, count in self._read().items() if count is None]

    def note(self, version: Version) -> None:
        """A version is about to be loaded."""
        counts = self._read()
        counts[version] = (counts.get(version) or 0) + 1
        self._write(counts)

    def note_deleted(self, version: Version) -> None:
        """The program deletes a version."""
        self._write(self._read() | {version: None})

    def forget(self) -> None:
        """Something newer was saved: whatever was loaded has served."""
        self._write(dict.fromkeys(self.deleted()))

    def _read(self) -> dict[Version, int | None]:
        """How often each version was loaded to no avail; None if it is deleted."""
        try:
            entries = json.loads(self._path.read_text())
            return {
                Version(int(epoch), int(step)): None if count is None else int(count)
                for epoch, step, count in entries
            }
        except (OSError, ValueError, TypeError):
            return {}

    def _write(self, counts: dict[Version, int | None]) -> None:
        deleted = sorted(version for version, count in counts.items() if count is None)
        gone = set(deleted[:-MOST_DELETED])
        entries = [
            [version.epoch, version.step, count] for version, count in counts.items() if version not in gone
        ]
        written = self._path.with_name(f"{FILE_NAME}.{os.getpid()}")
        with contextlib.suppress(OSError):
            if not entries:
                self._path.unlink(missing_ok=True)
                return
            written.write_text(json.dumps(entries))
            written.replace(self._path)
