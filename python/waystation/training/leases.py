"""Leases: who reads a checkpoint at present, so that nobody removes it meanwhile.

A reader puts a file into `.waystation-leases` beside the checkpoints, a collector one that condemns a
checkpoint. Each puts its own first and then looks for the other's. So of a reader and a collector that come
at the same time at least one sees the other, and gives way: a reader takes another checkpoint, a collector
leaves this one to the next collection.

The directory is there while a file is in it, so that programs which list steps do not meet it once nobody
reads. Whoever removes the last file removes the directory; whoever loses it between making it and putting a
file into it makes it again.

Both files have the identity of their process in their name, as attempts have (`layouts/native/attempts`):
whose process provably no longer runs counts for nothing, and is removed. Of a process on another machine that
cannot be proved. It counts until it has shown no sign of life for `EXPIRES_S`; a reader shows one each
`HEARTBEAT_S`, from a thread that runs while it holds something.

What can go wrong, in order: a reader is killed: its lease is dead. A collector is killed between condemning
and removing: what it condemned stays, and its mark is dead. The directory cannot be written to by a reader:
then it reads without a lease, and is safe only from those who cannot write there either.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from waystation import _forks
from waystation._errors import PermissionDenied, from_os_error
from waystation.layouts.native.attempts import is_dead, is_of_this_system, new_attempt_id, owner_record
from waystation.layouts.native.signs_of_life import EXPIRES_S, HEARTBEAT

DIRECTORY = ".waystation-leases"

# How often a directory is made again that others remove before it is used.
_MAX_TRIES = 1000

_LEASE, _CONDEMNED = ".lease-", ".condemned-"

_log = logging.getLogger("waystation")


class Leases:
    """The leases on the checkpoints of one directory."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[bool]:
        """Keeps the checkpoint of this name from being collected within the block.

        Yields:
            False if it is condemned already: then it must not be read.
        """
        owner = _forks.Owner()
        path = self._put(name, _LEASE)
        try:
            if self._living(name, _CONDEMNED):
                yield False
                return
            if path is None:
                yield True
                return
            with HEARTBEAT.of(os.fspath(path)):
                yield True
        finally:
            if path is not None and owner.is_here:  # in a forked child it is still that of the parent
                _remove(path)

    def is_held(self, name: str) -> bool:
        """Whether somebody reads the checkpoint of this name."""
        return self._living(name, _LEASE)

    @contextlib.contextmanager
    def condemned(self, name: str) -> Iterator[bool]:
        """Condemns the checkpoint of this name within the block.

        Yields:
            False if somebody reads it: then it must not be removed.
        """
        owner = _forks.Owner()
        path = self._put(name, _CONDEMNED)
        try:
            yield not self.is_held(name)
        finally:
            if path is not None and owner.is_here:
                _remove(path)

    def _put(self, name: str, kind: str) -> Path | None:
        path = self._directory / f"{name}{kind}{new_attempt_id()}"
        try:
            with self._create(path) as file:
                json.dump(owner_record(), file)
        except OSError as error:
            typed = from_os_error(error, "write the lease", os.fspath(path))
            if not isinstance(typed, PermissionDenied):  # which is how readers of others' checkpoints live
                _log.warning("checkpoint '%s' is used without a lease: %s", name, typed)
            return None
        return path

    def _create(self, path: Path) -> IO[str]:
        for _ in range(_MAX_TRIES):
            # Not `Path.mkdir(exist_ok=True)`, which fails where the directory goes just after it was there.
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._directory)
            with contextlib.suppress(FileNotFoundError):
                return path.open("x", encoding="utf-8")
        return path.open("x", encoding="utf-8")

    def _living(self, name: str, kind: str) -> bool:
        """Whether a process that may still run has put such a file; those of dead ones are removed."""
        living = False
        for found in self._listed():
            stem, infix, identity = found.rpartition(kind)
            if not infix or stem != name:
                continue
            path = self._directory / found
            if _is_over(path, identity):
                _remove(path)
            else:
                living = True
        return living

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self._directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise from_os_error(error, "list", os.fspath(self._directory)) from error


def _is_over(path: Path, identity: str) -> bool:
    """Whether the process that has put a file provably no longer runs, or has been silent for too long."""
    try:
        content = path.read_bytes()
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        owner = json.loads(content)
    except ValueError:
        owner = {}  # it is being written, or was never finished
    if is_dead(identity, os.fspath(path), owner if isinstance(owner, dict) else {}):
        return True
    return not is_of_this_system(identity) and age_s > EXPIRES_S


def _remove(path: Path) -> None:
    """Removes a file, and its directory if that is empty then."""
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()
