"""Leases in an object store: objects that show that a process is alive.

A process renews its lease each `HEARTBEAT_S`; one that was not renewed for `EXPIRES_S`, by the clock of the
store, has run out. Whoever takes a process for dead condemns its lease first, on condition that it is the
version that has run out; the process renews it on the same condition. So one of the two is told that the
other was faster.

A process that may write and remove nothing condemns its own lease to give it up.

The marks of readers and collectors (`StoreLeases`, see `leases`) are such leases beneath the checkpoint. They
rest on listings that have what was written before, as those of the stores are. Failure sequence: a reader is
killed: its mark runs out, and whoever sees it then removes it. A collector is killed: where the store removes
nothing but the version that was judged, its mark ends with its process, if that was of this machine. A copy
of this machine may hold the process of a mark that looks dead from here, and a request of a dead process may
still be under way; neither can do more than remove what it has judged.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from waystation import _forks, _native, storage
from waystation._errors import (
    Conflict,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unsupported,
    WaystationError,
)
from waystation.storage import names, object_store
from waystation.storage.attempts import is_gone, new_attempt_id, owner_record
from waystation.storage.leases import CONDEMNED, LEASE, is_mark
from waystation.storage.signs_of_life import EXPIRES_S, Heartbeat

# A lease that was renewed less than so long ago has not run out, by far.
FRESH_S = 30.0

_LIMIT_BYTES = 64 << 10
_MOST_STORES = 64
_IN_A_STORE = "s3://leases"
_TAKEN_FOR_DEAD = b'{"is_condemned": true}'
_ENDS_WITH_PROCESS = "ends_with_process"


class Lease:
    """That of this process on what the directory stands for, such as an attempt.

    Args:
        directory: The directory; its name ends with the id of an attempt of this process.
        ends_with_process: Whether it is over as soon as this process is: nothing that a request of it may
            still do after its death does harm.
    """

    def __init__(self, directory: str, *, ends_with_process: bool = False) -> None:
        self._owner = _forks.Owner()
        self._path = os.path.join(directory, names.OWNER)
        # The thread that renews it knows no options.
        self._store = object_store.of(directory).engine
        self._record = owner_record() | ({_ENDS_WITH_PROCESS: True} if ends_with_process else {})
        self._renewals = 0
        self._is_removed = False
        self._renewed_s = _now_s()
        self._version = self._store.put(self._path, self._content(), new=True)
        self._lock = threading.Lock()
        _forks.watch(self)
        self._heartbeat = _heartbeat_of(self._store)
        self._heartbeat.begin(self._path, self._touch)

    def begin_in_child(self) -> None:
        """See `_forks.Watched`: it is the parent's."""
        self._lock = threading.Lock()

    def _content(self) -> bytes:
        return json.dumps(self._record | {"renewals": self._renewals}).encode()

    def renew(self) -> None:
        """Shows that this process is alive.

        Raises:
            Conflict: Somebody has taken it for dead.
        """
        with self._lock:
            begun_s = _now_s()
            self._renewals += 1
            try:
                self._replace(self._content())
            except (Conflict, NotFound) as error:
                raise Conflict(
                    f"this process gave no sign of life for {EXPIRES_S / 60:g} minutes, so another one has "
                    "removed what it was writing; do it again",
                    path=self._path,
                ) from error
            self._renewed_s = begun_s

    def _replace(self, content: bytes) -> None:
        """Puts another content in its place, if it is still that of this process."""
        try:
            self._version = self._store.put(self._path, content, unchanged=self._version)
        except Conflict:
            ((present, version),) = self._store.get([(self._path, _LIMIT_BYTES)])
            if not self._is_own(present):
                raise
            # The answer to an earlier renewal was lost.
            self._version = self._store.put(self._path, content, unchanged=version)

    def _is_own(self, content: bytes) -> bool:
        with contextlib.suppress(ValueError):
            found = json.loads(content)
            return isinstance(found, dict) and found | {"renewals": 0} == self._record | {"renewals": 0}
        return False

    @property
    def may_have_run_out(self) -> bool:
        """Whether it was not renewed for so long that others may have taken this process for dead."""
        return _now_s() - self._renewed_s > EXPIRES_S - FRESH_S

    def renew_if_old(self) -> None:
        """The same, unless it was renewed so lately that nobody can have taken this process for dead."""
        if _now_s() - self._renewed_s > FRESH_S:
            self.renew()

    def _touch(self) -> None:
        with contextlib.suppress(WaystationError):  # who renews it last is told
            if not self._is_removed:
                self.renew()

    def end(self) -> None:
        """Renews it no more; once is enough."""
        self._heartbeat.end(self._path)

    def remove(self) -> None:
        """Gives it up; in a forked child it stays: it is that of the parent.

        Where the store lets this process write and remove nothing, the lease stays, and says that it is over.

        Raises:
            PermissionDenied: The store refuses both, so others take the process for alive until it has run
                out.
            WaystationError: What else a removal raises.
        """
        if self._owner.is_here:
            self._is_removed = True
            self.end()
            with self._lock:  # a renewal that arrived later would put it there again
                try:
                    self._store.remove(self._path)
                except (InvalidInput, PermissionDenied):
                    with contextlib.suppress(Conflict, NotFound):  # another process has taken it away
                        self._replace(_TAKEN_FOR_DEAD)


class _Renewals(Heartbeat):
    """Renews the leases in one store side by side, as each is a journey to it."""

    def _touch_all(self, held: Sequence[Callable[[], None]]) -> None:
        storage.side_by_side(_IN_A_STORE, lambda touch: touch(), held)


@functools.lru_cache(_MOST_STORES)
def _heartbeat_of(store: _native.ObjectStore) -> _Renewals:
    """What renews the leases in a store. Each store has its own: one that does not answer must not keep the
    leases in others from being renewed."""
    return _Renewals()


def _now_s() -> float:
    """The time, by a clock that goes on while the system sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def end_if_dead(directory: str) -> bool:
    """Whether the process that writes the attempt with this directory has none any more, or has no lease:
    then it can commit nothing."""
    path, store = os.path.join(directory, names.OWNER), object_store.of(directory).engine
    try:
        ((content, version),) = store.get([(path, _LIMIT_BYTES)])
    except NotFound:
        return True
    if content == _TAKEN_FOR_DEAD:
        return True
    if not _has_ended_with_process(directory, content) and not has_run_out(directory, version[1]):
        return False
    try:
        store.put(path, _TAKEN_FOR_DEAD, unchanged=version)
    except (Conflict, NotFound):
        return False
    return True


def _has_ended_with_process(directory: str, content: bytes) -> bool:
    _, _, attempt_id = os.path.basename(directory).rpartition(CONDEMNED)
    return _decoded(content).get(_ENDS_WITH_PROCESS) is True and is_gone(attempt_id)


def _decoded(content: bytes) -> dict[str, Any]:
    """What a lease says of its owner; nothing where it is damaged."""
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def has_run_out(directory: str, renewed_ns: int) -> bool:
    """Whether what was written then, there or beside it, has run out, by the clock of the store."""
    if time.time_ns() - renewed_ns <= EXPIRES_S * 1e9:
        return False
    store = object_store.of(directory).engine
    probe = os.path.join(os.path.dirname(directory), names.attempt("", new_attempt_id()), names.OWNER)
    try:
        store.put(probe, _TAKEN_FOR_DEAD, new=True)
    except PermissionDenied:
        return False  # who cannot write there removes nothing there
    try:
        ((_, version),) = store.get([(probe, _LIMIT_BYTES)])
    except NotFound:
        return False  # whoever cleans up has taken it for that of a dead attempt
    finally:
        store.remove(probe)
    return version[1] - renewed_ns > EXPIRES_S * 1e9


# ---- readers and collectors --------------------------------------------------------------------


class StoreLeases:
    """The leases on the checkpoints of one directory in a store; see `leases.Leases`."""

    def __init__(self, root: str) -> None:
        self._root = root

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[bool]:
        """See `leases.Leases`."""
        with self._marked(name, LEASE):
            yield not self._is_marked(name, CONDEMNED)

    def is_held(self, name: str) -> bool:
        """See `leases.Leases`."""
        return self._is_marked(name, LEASE)

    @contextlib.contextmanager
    def condemned(self, name: str) -> Iterator[bool]:
        """See `leases.Leases`."""
        with self._marked(name, CONDEMNED):
            yield not self._is_marked(name, LEASE, names.ATTEMPT_INFIX)

    @contextlib.contextmanager
    def without_saves(self, name: str) -> Iterator[bool]:
        """Condemns a checkpoint whoever reads it.

        Yields:
            False while a save to its path is under way that may not have seen the mark.
        """
        with self._marked(name, CONDEMNED):
            yield not self._is_marked(name, names.ATTEMPT_INFIX)

    @contextlib.contextmanager
    def _marked(self, name: str, kind: str) -> Iterator[None]:
        """Has a mark at a checkpoint within the block, if this process may write there."""
        directory = os.path.join(self._root, name, f"{kind}{new_attempt_id()}")
        try:
            is_harmless = kind == CONDEMNED and object_store.of(directory).removes_in_one_act(directory)
            mark = Lease(directory, ends_with_process=is_harmless)
        except (PermissionDenied, Unsupported):  # how readers of others' checkpoints live
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(WaystationError):  # it runs out
                mark.remove()

    def _is_marked(self, name: str, *kinds: str) -> bool:
        """Whether a process that may be alive has such a mark, or an attempt, at a checkpoint."""
        checkpoint = os.path.join(self._root, name)
        found = [entry.name for entry in storage.entries_or_none(checkpoint) if entry.name.startswith(kinds)]
        return len(remove_dead_marks(checkpoint, found)) < len(found)


def is_condemned(checkpoint: str, *, besides: str | None = None) -> bool:
    """Whether a process that may be alive has condemned a checkpoint, by another mark than `besides`."""
    names_there = [entry.name for entry in storage.entries_or_none(checkpoint)]
    found = [name for name in names_there if name.startswith(CONDEMNED) and name != besides]
    return len(remove_dead_marks(checkpoint, found)) < len(found)


def remove_dead_marks(checkpoint: str, present: list[str]) -> list[str]:
    """Those of the marks, or leases of attempts, at a checkpoint whose processes are dead; marks are removed.

    Args:
        checkpoint: The checkpoint.
        present: Their names.
    """
    dead = [name for name in present if end_if_dead(os.path.join(checkpoint, name))]
    for name in filter(is_mark, dead):
        with contextlib.suppress(PermissionDenied):
            storage.remove_tree(os.path.join(checkpoint, name))
    return dead


def read_lease(directory: str) -> tuple[dict[str, Any], int] | None:
    """Who holds the lease on the attempt with this directory, and when it was renewed, in nanoseconds by the
    clock of the store; None where nobody does."""
    path, store = os.path.join(directory, names.OWNER), object_store.of(directory).engine
    try:
        ((content, version),) = store.get([(path, _LIMIT_BYTES)])
    except NotFound:
        return None
    if content == _TAKEN_FOR_DEAD:
        return None
    return _decoded(content), version[1]
