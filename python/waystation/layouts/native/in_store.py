"""Checkpoints in a storage without renames: the attempt, the commit, and what is left of killed saves.

An attempt writes beneath the path of the checkpoint from the start, to directories whose names have its id,
so that no name is ever used again. The commit creates `checkpoint.json`, or replaces the version that was
there when the attempt began: one request, which fails if another writer was faster. Failure sequence: killed
before the commit, what was there stays, and the data of the attempt are beneath it, without a name; killed
after it, the new checkpoint is there, and the data that it replaced are without one. Whoever saves or deletes
there next removes data without a name whose attempt has no lease any more (`remove_dead`). Data to which
other checkpoints refer stay, whoever removes (`references`).

A gap is left: a process that is stopped for ten minutes right between the last renewal of its lease and its
commit may commit what another one has removed. A load then finds files missing, and says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from waystation import _forks, storage
from waystation._errors import (
    CheckpointableNotFound,
    Conflict,
    Corrupt,
    DiskFull,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
    WaystationError,
)
from waystation.layouts.native import names, records, references
from waystation.storage.attempts import Leftover, is_of_this_system, new_attempt_id
from waystation.storage.leases import is_mark
from waystation.storage.signs_of_life import EXPIRES_S
from waystation.storage.store_leases import (
    Lease,
    StoreLeases,
    end_if_dead,
    has_run_out,
    is_condemned,
    read_lease,
    remove_dead_marks,
)

_log = logging.getLogger("waystation")

# How long a save waits for whoever removes what is there, and that one for saves, where it has to.
_COLLECTED_WITHIN_S, _SAVED_WITHIN_S, _LOOK_AGAIN_S = 20.0, 5.0, 0.1


class StoreAttempt:
    """One try at writing the checkpoint at `target`, beneath that path.

    It removes what dead attempts have left there. Each request is a journey to the store, so what need not
    wait for each other goes at once.

    Args:
        target: The path.
        overwrite: Whether it replaces the checkpoint that is there now.
        removes_dead: Whether it begins with the removal; else `remove_others` is for the caller to call.
        judged: The version of the record that may be replaced; by default whatever is there.

    Attributes:
        target: The path.
        id: What the names of its data have in them.
        path: The directory of its lease; `names.directory_in` says where its data are.
        owners: The checkpoints beside it to whose data it may refer, with the directories of these.

    Raises:
        Conflict: Another version is there than `judged`.
        PermissionDenied, Unavailable, NotFound: The store refuses it, cannot be reached, or has no such
            bucket.
    """

    def __init__(
        self,
        target: str,
        *,
        overwrite: bool,
        removes_dead: bool = True,
        judged: storage.Identity | None = None,
    ) -> None:
        self.target = target
        self.id: str = new_attempt_id()
        self.path: str = os.path.join(target, storage.names.attempt("", self.id))
        self._owner = _forks.Owner()
        self._replaced: _Replaced | None = None
        self._may_be_committed = False
        self._is_refused = False  # the commit
        self.owners: references.Owners = {}
        leases: list[Lease] = []

        def look() -> None:
            if overwrite:
                self._replaced = _present(target)
                if self._replaced is not None and judged not in (None, self._replaced.version):
                    raise replaced_meanwhile(target)

        calls = [lambda: leases.append(Lease(self.path)), look]
        if removes_dead:
            calls.append(self.remove_others)
        try:
            storage.side_by_side(target, call_it, calls)
        except BaseException:
            for lease in leases:
                give_up(lease, f"no collection removes what is at '{target}'")
            raise
        (self._lease,) = leases

    def remove_others(self) -> None:
        """Removes what dead attempts have left at the path."""
        with warned(f"what killed saves have left of '{self.target}'"):
            remove_dead(self.target, besides=self.id)

    def write_last(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Writes the last files before the commit, and shows that this process is alive.

        Whoever condemns the checkpoint that is there has either seen the lease of this attempt by now, and
        gives way, or is seen here, and goes first.

        Raises:
            Conflict: Another process has taken this one for dead, or is removing what is there, for too long.
        """
        calls = [
            lambda: storage.of(self.target).write_files(files),
            self._lease.renew,
            self._give_way_to_collectors,
        ]
        storage.side_by_side(self.target, call_it, calls)

    def _give_way_to_collectors(self) -> None:
        deadline = time.monotonic() + _COLLECTED_WITHIN_S
        while self._replaced is not None and is_condemned(self.target):
            if time.monotonic() > deadline:
                raise Conflict(
                    f"another process is removing the checkpoint at '{self.target}'; save there again "
                    "once it has ended, or save to another path",
                    path=self.target,
                )
            time.sleep(_LOOK_AGAIN_S)
            if _present(self.target) is None:
                self._replaced = None

    def publish(self, record: records.CheckpointRecord) -> None:
        """Commits, and removes what that replaces.

        Args:
            record: Of the first generation.

        Raises:
            Conflict: Another writer was faster, or has taken this one for dead.
        """
        self._lease.renew_if_old()
        self._may_be_committed = True  # whatever ends the request, be it an interrupt
        try:
            content = self._put(record)
        except Conflict as error:
            self._may_be_committed = False
            raise Conflict(
                f"another writer of '{self.target}' was faster, and what it has saved was left alone; "
                "look at it, or save to another path",
                path=self.target,
            ) from error
        except BaseException as error:
            self._is_refused = isinstance(error, PermissionDenied | DiskFull)
            error.add_note(f"whether this was saved to '{self.target}' is not known; load it to find out")
            raise
        if self._lease.may_have_run_out:
            self._check_alive(content)
        with warned(f"what is not needed of '{self.target}' any more"):
            self._remove_replaced()

    def _put(self, record: records.CheckpointRecord) -> bytes:
        """Puts the record, in the place of the version that it replaces if that is there still."""
        place, path = storage.of(self.target), os.path.join(self.target, names.RECORD)
        if self._replaced is not None:
            content = dataclasses.replace(record, generation=self._replaced.generation + 1).encode()
            try:
                place.replace(path, content, self.id, expected=self._replaced.version)
            except Conflict:
                if storage.is_there(path):
                    raise
                self._replaced = None  # a deletion was faster, which a save does not mind
            else:
                return content
        content = record.encode()
        place.create(path, content, self.id)
        return content

    def _remove_replaced(self) -> None:
        """Gives up the lease, and removes what the commit has replaced, and what this attempt was the last to
        protect from others."""
        replaced = () if self._replaced is None else self._replaced.directories
        calls: list[Callable[[], object]] = [self._lease.remove]
        if replaced:
            calls.append(partial(references.remove, self.target, replaced))
        if self.owners:  # who removes looks at the lease of whoever refers to anything
            self._lease.remove()
            calls[0] = partial(references.sweep, os.path.dirname(self.target), self.owners)
        storage.side_by_side(self.target, call_it, calls)
        if self._replaced is not None and not replaced:
            remove_dead(self.target)  # what the damaged record has named

    def _check_alive(self, content: bytes) -> None:
        """Takes a commit back if the process was stopped right before it for so long that another one has
        removed what it names."""
        try:
            self._lease.renew()
        except Conflict:
            path = os.path.join(self.target, names.RECORD)
            present, version = storage.read_version(path, limit_bytes=records.RECORD_LIMIT_BYTES)
            if present == content and self._replaced is None:
                with contextlib.suppress(Conflict):  # another one has replaced it
                    storage.remove_file(path, expected=version)
            elif present == content and self._replaced is not None:
                storage.of(path).replace(path, self._replaced.content, self.id, expected=version)
            raise

    def leave(self) -> None:
        """Ends it without a commit. Its data stay until they have run out, for a copy that goes on with
        them."""
        if self._owner.is_here:
            self._lease.end()
            if not self._may_be_committed:
                with warned(f"the lease of a copy to '{self.target}' that did not end"):
                    self._lease.remove()

    def discard(self) -> None:
        """Removes all that the attempt has made; in a child that was forked meanwhile it does nothing."""
        if not self._owner.is_here:
            return
        self._lease.end()
        if self._may_be_committed:
            # Whoever saves there finds out, and removes what is not needed once that has run out. Only what
            # others own is protected by the lease alone.
            if self._is_refused and not self.owners:
                self._give_up()
            return
        if self._give_up(self._remove_data) and self.owners:
            with warned(f"what a failed save to '{self.target}' was the last to need"):
                references.sweep(os.path.dirname(self.target), self.owners)

    def _remove_data(self) -> None:
        for entry in storage.entries_or_none(self.target):
            if names.mover(entry.name) == self.id:
                storage.remove_tree(os.path.join(self.target, entry.name))
        if self.owners:
            references.withdraw(os.path.dirname(self.target), self.id, self.owners)

    def _give_up(self, first: Callable[[], None] = lambda: None) -> bool:
        return give_up(self._lease, f"no collection removes what is at '{self.target}'", first)


def give_up(lease: Lease, until_then: str, first: Callable[[], None] = lambda: None) -> bool:
    """Gives up the lease of what has failed. Where the store refuses that too, the error that is being
    raised says so.

    Args:
        lease: The lease.
        until_then: What does not happen until it has run out.
        first: Removes what the attempt has made.

    Returns:
        Whether it was given up.
    """
    failure = sys.exception()
    try:
        try:
            first()
        except Unavailable:  # nor would the next request be answered
            raise
        except WaystationError as error:
            _log.warning("what a failed save has written could not be removed: %s", error)
        lease.remove()
    except WaystationError as error:
        _log.warning("a lease could not be given up: %s", error)
        if failure is not None:
            failure.add_note(
                f"its lease could not be given up either: {error}. Until that has run out, "
                f"{EXPIRES_S / 60:g} minutes after its last renewal, {until_then}"
            )
        return False
    return True


def call_it(call: Callable[[], object]) -> None:
    """Calls it: what is done side by side is given so."""
    call()


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """For removals: how the save itself has ended says more. What stays is removed by the next one."""
    try:
        yield
    except WaystationError as error:
        _log.warning("%s could not be removed: %s", what, error)


@dataclasses.dataclass(frozen=True, slots=True)
class _Replaced:
    """What an overwrite replaces.

    Attributes:
        version: Of its record.
        content: The record.
        generation: 0 where the record is damaged.
        directories: Those that it names; none where it is damaged.
    """

    version: storage.Identity
    content: bytes
    generation: int = 0
    directories: Sequence[str] = ()


def _present(target: str) -> _Replaced | None:
    """The checkpoint that is there."""
    path = os.path.join(target, names.RECORD)
    try:
        content, version = storage.read_version(path, limit_bytes=records.RECORD_LIMIT_BYTES)
    except NotFound:
        return None
    try:
        record = records.CheckpointRecord.decode(content, path)
    except (Corrupt, Unsupported):
        return _Replaced(version, content)
    directories = [name for name, _ in record.checkpointables.values()]
    return _Replaced(version, content, record.generation, directories)


def withdraw(target: str, *, created_ns: int | None = None) -> None:
    """Removes a checkpoint: it is gone in one act, whatever happens to the removal of its data.

    Args:
        target: The checkpoint.
        created_ns: See `require_judged`; by default the version goes that is there now.

    Raises:
        Conflict: Another version has taken its place, and stays.
    """
    present = _present(target)
    if present is not None:
        if created_ns is not None:
            require_judged(target, present.content, created_ns)
        _remove_record(target, present.version)
        references.remove(target, present.directories)
    remove_dead(target)


def _remove_record(target: str, version: storage.Identity) -> None:
    """Removes this version of a record, and no other one.

    A store that compares and removes in two acts could be given another version between them. There a save
    gives way to whoever condemns a checkpoint (`StoreAttempt.write_last`), and who removes one to saves that
    may not have seen that.
    """
    path = os.path.join(target, names.RECORD)
    if storage.of(path).removes_in_one_act(path):
        _remove_version(target, version)
        return
    parent, name = os.path.split(target)
    deadline = time.monotonic() + _SAVED_WITHIN_S
    while True:
        with StoreLeases(parent).without_saves(name) as may_go:
            if may_go:
                _remove_version(target, version)
                return
        if time.monotonic() > deadline:
            raise Conflict(
                f"another process saves to '{target}', and this store could remove what that commits; delete "
                "it again once that has ended",
                path=target,
            )
        time.sleep(_LOOK_AGAIN_S)


def _remove_version(target: str, version: storage.Identity) -> None:
    try:
        storage.remove_file(os.path.join(target, names.RECORD), expected=version)
    except Conflict as error:
        raise replaced_meanwhile(target) from error


def replaced_meanwhile(target: str) -> Conflict:
    """The error of whoever was to replace or remove a version that has gone."""
    return Conflict(
        f"'{target}' was replaced meanwhile, and what is there now was not judged; it stays", path=target
    )


def require_judged(target: str, record: bytes, created_ns: int) -> None:
    """Refuses to remove another version of a checkpoint than the one that a policy has judged.

    Args:
        target: The checkpoint.
        record: What is there now; one that is damaged tells nothing.
        created_ns: When the one that was judged was committed.

    Raises:
        Conflict: It is another one.
    """
    with contextlib.suppress(Corrupt, Unsupported):
        found = records.CheckpointRecord.decode(record, os.path.join(target, names.RECORD))
        if found.created_ns != created_ns:
            raise replaced_meanwhile(target)


def withdraw_checkpointable(target: str, name: str, attempt_id: str) -> None:
    """Removes one of several checkpointables: a new version of the record, which does not name it, is the
    act.

    Raises:
        CheckpointableNotFound: It has gone meanwhile.
        Conflict: The checkpoint was replaced meanwhile.
    """
    path = os.path.join(target, names.RECORD)
    content, version = storage.read_version(path, limit_bytes=records.RECORD_LIMIT_BYTES)
    record = records.CheckpointRecord.decode(content, path)
    remaining = dict(record.checkpointables)
    if name not in remaining:
        raise CheckpointableNotFound(
            f"checkpoint '{target}' has no checkpointable '{name}' any more", path=target
        )
    directory, _ = remaining.pop(name)
    shrunk = dataclasses.replace(record, generation=record.generation + 1, checkpointables=remaining)
    storage.of(target).replace(path, shrunk.encode(), attempt_id, expected=version)
    references.remove(target, [directory])


def is_vacant(target: str) -> bool:
    """Whether nothing is at a path but what attempts and readers have there for a while, or have left."""
    return all(names.is_passing(entry.name) for entry in storage.entries_or_none(target))


def remove_dead(
    target: str, attempt_ids: Collection[str] | None = None, *, besides: str | None = None
) -> list[str]:
    """Removes data beneath a path that its record does not name, and whose attempt is over, and marks of dead
    readers; returns the paths of the data.

    Data to which other checkpoints refer stay; references that nobody stands behind go.

    An attempt takes its lease before it writes anything, and gives it up after its commit. So the leases are
    looked at before the record is: what has none and is not named then, no attempt will name. But somebody
    may be copying a checkpoint to this place, file by file, whose record comes last. So what has no lease has
    to have run out as well, by its youngest file.

    Args:
        target: The path.
        attempt_ids: Those that may be removed; by default all.
        besides: The one that this process has just begun.
    """
    present = _directories(target)
    remove_dead_marks(target, [name for name in present if is_mark(name)])
    data, leases = (
        {name: owner for name, owner in found.items() if owner != besides} for found in _of_attempts(present)
    )
    has_references = references.are_among(present)
    if not data and not leases and not has_references:
        return []
    try:
        named = references.named(target)
    except (Corrupt, Unsupported):
        return []  # nothing tells what is its own
    unnamed = [name for name in data if name not in named]
    removed = []
    if has_references:
        unnamed, dead = references.unprotected(target, unnamed)
        removed = [path for owner, path in dead if attempt_ids is None or owner in attempt_ids]
        storage.side_by_side(target, storage.remove_file, removed)
    owners = {*leases.values(), *(data[name] for name in unnamed)}
    if attempt_ids is not None:
        owners &= {*attempt_ids}
    unleased = owners - {*leases.values()}
    over = {owner for owner in owners if end_if_dead(_lease_of(target, owner))}
    over -= {owner for owner in over & unleased if not _has_run_out(target, _data_of(owner, data, unnamed))}
    if not over:
        return removed
    named = references.named(target)  # anew: what has no lease now had its commit before
    unneeded = [name for name in unnamed if data[name] in over and name not in named]
    unneeded += [name for name, owner in leases.items() if owner in over]
    return removed + [os.path.join(target, name) for name in references.remove(target, unneeded)]


def _data_of(owner: str, data: Mapping[str, str], unnamed: Iterable[str]) -> list[str]:
    return [name for name in unnamed if data[name] == owner]


def _has_run_out(target: str, directories: Sequence[str]) -> bool:
    paths = [os.path.join(target, name) for name in directories]
    return all(has_run_out(path, youngest_ns([path])) for path in paths)


def _directories(target: str) -> list[str]:
    return [entry.name for entry in storage.entries_or_none(target) if entry.kind == "directory"]


def _of_attempts(present: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Those of the directories that hold data, and those that hold leases, with the ids of their attempts."""
    data = {name: mover for name in present if (mover := names.mover(name)) is not None}
    leases = {name: owner for name in present if (owner := storage.names.attempt_id(name)) is not None}
    return data, leases


def _lease_of(target: str, attempt_id: str) -> str:
    return os.path.join(target, storage.names.attempt("", attempt_id))


def leftovers(target: str) -> list[Leftover]:
    """The attempts beneath a path that have not ended, or have left something, in the order of `remove_dead`.

    The path of each is the directory of its lease, whether or not that is there. `dead` are those without a
    lease, and those whose process is gone, once their lease or their youngest file has run out.
    """
    present = _directories(target)
    data, leases = _of_attempts(present)
    if not data and not leases and not references.are_among(present):
        return []
    found = {owner: read_lease(_lease_of(target, owner)) for owner in {*data.values(), *leases.values()}}
    try:
        named = references.named(target)
    except (Corrupt, Unsupported):
        return []  # nothing tells what is its own
    places: dict[str, list[str]] = {owner: [] for owner in leases.values()}
    unnamed = [name for name in data if name not in named]
    if references.are_among(present):
        unnamed, dead = references.unprotected(target, unnamed)
        for owner, path in dead:
            places.setdefault(owner, []).append(os.path.basename(os.path.dirname(path)))
    for name in unnamed:
        places.setdefault(data[name], []).append(name)
    return [
        leftover(
            target, owner, found.get(owner), [*places[owner], os.path.basename(_lease_of(target, owner))]
        )
        for owner in sorted(places)
    ]


def leftover(
    target: str, attempt_id: str, lease: tuple[dict[str, Any], int] | None, directories: Sequence[str]
) -> Leftover:
    """An attempt beneath a path: with this lease, if it has one, and these directories of data."""
    owner, renewed_ns = lease or ({}, youngest_ns(os.path.join(target, name) for name in directories))
    age_s = max(0.0, time.time() - renewed_ns / 1e9)
    path, name = _lease_of(target, attempt_id), os.path.basename(target)
    described = Leftover(path, name, "save", attempt_id, dead=False, age_s=age_s, owner=owner)
    is_gone = is_of_this_system(attempt_id) and not described.is_running and age_s > EXPIRES_S
    return dataclasses.replace(described, dead=is_gone or (lease is None and age_s > EXPIRES_S))


def youngest_ns(directories: Iterable[str]) -> int:
    """When the youngest file below some directories was written; now, where there is none."""
    newest = 0
    for directory in directories:
        with contextlib.suppress(NotFound):  # removed meanwhile
            paths = [os.path.join(directory, name) for name in storage.files_below(directory)]
            found = storage.side_by_side(directory, storage.status, paths)
            newest = max([newest, *(each.identity.modified_ns for each in found if each is not None)])
    return newest or time.time_ns()


def directories_of(target: str, attempt_id: str) -> list[str]:
    """What an attempt has beneath a path and no record names."""
    data, leases = _of_attempts(_directories(target))
    try:
        named = references.named(target)
    except (Corrupt, Unsupported):
        return []
    own = [name for name, owner in (data | leases).items() if owner == attempt_id and name not in named]
    return [os.path.join(target, name) for name in own]
