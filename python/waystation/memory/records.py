"""What a program remembers of the memory tier across restarts, in two small files beside the checkpoints.

Memory cannot tell these things itself, because all of it may be lost. The primary alone reads and writes the
files, and nothing is raised: a file that cannot be written is not remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from waystation.memory.versions import Version

COMMITTED_FILE = "memory-committed.json"
_FORMAT_VERSION = 1
_WRITTEN_EVERY_S = 1.0


class CommittedRecord:
    """The newest committed step that memory has had of a sequence.

    Agents that lost their memory cannot say what was committed, so the record can. It is written at most once
    a second, and may therefore name an earlier step than the newest. A record that cannot be read counts as
    if something had been committed, because a program that begins from nothing by mistake overwrites what
    there was.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / COMMITTED_FILE
        self._unwritten: Version | None = None
        self._written_at_s: float | None = None

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
        """A version is committed, and newer than those before it."""
        self._unwritten = version
        now_s = time.monotonic()
        if self._written_at_s is None or now_s - self._written_at_s >= _WRITTEN_EVERY_S:
            self._written_at_s = now_s
            self.write()

    def write(self) -> None:
        """Writes down what is noted and not written yet."""
        version, self._unwritten = self._unwritten, None
        if version is None:
            return
        record = {"version": _FORMAT_VERSION, "epoch": version.epoch, "step": version.step}
        written = self._path.with_name(f"{COMMITTED_FILE}.{os.getpid()}")
        with contextlib.suppress(OSError):
            written.write_text(json.dumps(record))
            written.replace(self._path)

    def go_back_to(self, version: Version) -> None:
        """The program has deleted what was newer."""
        self._unwritten = version
        self.write()

    def forget(self) -> None:
        """The program has deleted whatever memory had."""
        self._unwritten = self._written_at_s = None
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


MOST_FRUITLESS_RESTORES = 2
# Agents keep few versions, so that older ones than these are not there any more.
MOST_DELETED = 64
RESTORES_FILE = "memory-restores.json"


class Restores:
    """Which versions are not to be loaded.

    A version that a program loads, and then ends before it has saved anything newer, may be what makes it
    end. After so many such loads it is passed over. So is what the program has deleted while the agents of
    several hosts still keep it. The record is advice: if it cannot be read, it counts as empty.

    Args:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / RESTORES_FILE

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
        written = self._path.with_name(f"{RESTORES_FILE}.{os.getpid()}")
        with contextlib.suppress(OSError):
            if not entries:
                self._path.unlink(missing_ok=True)
                return
            written.write_text(json.dumps(entries))
            written.replace(self._path)
