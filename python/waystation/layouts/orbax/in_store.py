"""One save in one of Orbax's layouts to an object store, where files have their final names from the start.

Orbax's rule for stores decides what is committed: `commit_success.txt` is written last, and a directory
without it is no checkpoint. Names of files are Orbax's, so nothing in them tells one attempt from another.
Writers exclude each other by `_CHECKPOINT_METADATA`, which an attempt creates first, on condition that it is
not there.

Failure sequence: killed before that file is there, a save leaves a lease. Killed later, it leaves files that
are no checkpoint; whoever saves there, or collects, once the lease has run out, condemns the lease, removes
the files, and that file last. A process that is stopped for so long finds its lease condemned and commits
nothing; what it had been writing at that moment may still replace a file of the next save, and a load of that
one says that the file is damaged.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence

from waystation import _forks, storage
from waystation._errors import Conflict, Unsupported, WaystationError
from waystation.layouts.native.in_store import call_it, give_up, leftover, warned, youngest_ns
from waystation.layouts.orbax import names
from waystation.storage.attempts import Leftover, new_attempt_id
from waystation.storage.leases import CONDEMNED, is_mark
from waystation.storage.signs_of_life import EXPIRES_S
from waystation.storage.store_leases import Lease, end_if_dead, has_run_out, is_condemned, read_lease


class OrbaxStoreAttempt:
    """One try at writing a checkpoint of Orbax's at `target`.

    Args:
        target: The path.
        metadata: The first content of `_CHECKPOINT_METADATA`.

    Attributes:
        path: Where files are written: the target itself.
        id: What tells it from other attempts.

    Raises:
        Conflict: Another save writes there, or was killed less than ten minutes ago.
        PermissionDenied, Unavailable, NotFound: The store refuses it, cannot be reached, or has no such
            bucket.
    """

    def __init__(self, target: str, metadata: bytes) -> None:
        self.path = target
        self.id: str = new_attempt_id()
        self._owner = _forks.Owner()
        self._may_be_committed = False
        self._lease = Lease(_lease_of(target, self.id))
        try:
            self._claim(metadata)
        except BaseException:
            self._give_up()
            raise

    def _claim(self, metadata: bytes) -> None:
        if is_condemned(self.path):
            raise taken(self.path)
        file = os.path.join(self.path, names.CHECKPOINT_METADATA)
        try:
            storage.of(file).create(file, metadata, self.id)
        except Conflict as error:
            raise taken(self.path) from error

    def write_last(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Writes the last files before the commit, and shows that this process is alive.

        Raises:
            Conflict: Another process has taken this one for dead.
        """
        calls = [lambda: storage.of(self.path).write_files(files), self._lease.renew]
        storage.side_by_side(self.path, call_it, calls)

    def publish(self, content: bytes) -> None:
        """Commits, by a file with this content, which no other attempt has: so an answer that was lost is
        told from another writer's success.

        Raises:
            Conflict: Another process has taken this one for dead.
        """
        file = os.path.join(self.path, names.COMMIT_SUCCESS)
        self._lease.renew_if_old()
        self._may_be_committed = True  # whatever ends the request, be it an interrupt
        try:
            storage.of(file).create(file, content, self.id)
        except Conflict:
            self._may_be_committed = False
            raise
        except BaseException as error:
            error.add_note(f"whether this was saved to '{self.path}' is not known; load it to find out")
            raise
        if self._lease.may_have_run_out:
            try:
                self._lease.renew()
            except Conflict:
                # Another writer may have begun, and committed, since this was taken for dead.
                if storage.read_file(file, limit_bytes=len(content) + 1) == content:
                    storage.remove_file(file)
                raise
        with warned(f"the lease of the save to '{self.path}'"):
            self._lease.remove()

    def discard(self) -> None:
        """Removes all that the attempt has made; in a child that was forked meanwhile it does nothing."""
        if not self._owner.is_here:
            return
        self._lease.end()
        if self._may_be_committed:
            return  # whoever saves there once the lease has run out finds out
        self._give_up(self._remove_data)

    def _remove_data(self) -> None:
        self._require_lease()
        _remove_files(self.path, [entry.name for entry in storage.entries_or_none(self.path)])

    def _require_lease(self) -> None:
        """Makes sure that what is there is not another writer's by now.

        Raises:
            WaystationError: That cannot be told.
        """
        try:
            self._lease.renew()
        except Conflict:
            raise
        except WaystationError:  # as where there is no room
            if self._lease.may_have_run_out:
                raise

    def _give_up(self, first: Callable[[], None] = lambda: None) -> None:
        give_up(self._lease, f"nothing can be saved to '{self.path}'", first)


def _lease_of(target: str, attempt_id: str) -> str:
    return os.path.join(target, storage.names.attempt("", attempt_id))


def is_unfinished(present: Collection[str]) -> bool:
    """Whether a directory in a store with these names is a save that has not ended, or did not."""
    marks = {names.CHECKPOINT_METADATA, names.COMMIT_SUCCESS, storage.names.COMMIT}
    return marks.intersection(present) == {names.CHECKPOINT_METADATA}


def is_begun(target: str) -> bool:
    """Whether a save to a path, or a copy, has begun and not ended."""
    return storage.is_in_store(target) and is_unfinished(
        [entry.name for entry in storage.entries_or_none(target)]
    )


def taken(target: str) -> Conflict:
    """The error of a save to a path at which another one has begun."""
    return Conflict(
        f"another process saves to '{target}' or deletes there, or was killed there less than "
        f"{EXPIRES_S / 60:g} minutes ago, and Orbax's layouts leave room for one; wait for it, or save to "
        "another path",
        path=target,
    )


def require_none_of_ours(target: str) -> None:
    """Refuses to replace a checkpoint in Waystation's own layout, whose record would go on to count.

    Raises:
        Unsupported: One is there.
    """
    if storage.is_there(os.path.join(target, storage.names.COMMIT)):
        raise Unsupported(
            f"'{target}' is a checkpoint in Waystation's own layout, which none of Orbax's replaces in a "
            "store; delete it first, or choose another path",
            path=target,
        )


def remove_unfinished(target: str) -> bool:
    """Removes what a save to a path has left that did not end; returns whether the path is free now.

    The leases are looked at before the commit is: what has none then was committed before, or never will be.
    Somebody may be copying a checkpoint to this place, file by file. So what has no lease has to have run
    out, by its youngest file.
    """
    if not is_unfinished([entry.name for entry in storage.entries_or_none(target)]):
        return False
    with _removing(target) as mark:
        present = [entry.name for entry in storage.entries_or_none(target)]
        owners = [name for name in present if storage.names.attempt_id(name) is not None]
        leases = [os.path.join(target, name) for name in owners]
        if is_condemned(target, besides=mark) or not all(map(end_if_dead, leases)):
            return False
        if not leases and not _have_run_out(target, present):
            return False
        if storage.is_there(os.path.join(target, names.COMMIT_SUCCESS)):
            return False
        _remove_files(target, present)
        storage.side_by_side(target, storage.remove_tree, leases)
    return True


@contextlib.contextmanager
def _removing(target: str) -> Iterator[str]:
    """Shows that files are being removed whose names the next save would use; gives the name of the mark. A
    save has its lease before it looks for marks, and a removal of leftovers its mark before it looks for
    leases, so one of two sees the other."""
    name = f"{CONDEMNED}{new_attempt_id()}"
    mark = Lease(os.path.join(target, name))
    try:
        yield name
    finally:
        with warned(f"the mark of a removal at '{target}'"):
            mark.remove()


def _have_run_out(target: str, present: Sequence[str]) -> bool:
    return has_run_out(os.path.join(target, present[0]), youngest_ns([target]))


def _remove_files(target: str, present: Sequence[str]) -> None:
    """Removes what is Orbax's of the names in a directory, that which keeps other writers away last."""
    own = [name for name in present if not is_mark(name) and storage.names.attempt_id(name) is None]
    rest = [os.path.join(target, name) for name in own if name != names.CHECKPOINT_METADATA]
    storage.side_by_side(target, storage.remove_tree, rest)
    storage.remove_file(os.path.join(target, names.CHECKPOINT_METADATA))


def withdraw(target: str, *, expected: storage.Identity | None = None) -> None:
    """Removes a checkpoint: it is gone in one act, whatever happens to the removal of its files.

    Args:
        target: The checkpoint.
        expected: The version of the file that commits it; by default whatever is there.

    Raises:
        Conflict: Another version is there, and stays.
    """
    with _removing(target):
        committed = os.path.join(target, names.COMMIT_SUCCESS)
        if storage.is_there(committed):  # else another process has removed it, and one may be saving here
            storage.remove_file(committed, expected=expected)
            _remove_files(target, [entry.name for entry in storage.entries_or_none(target)])


def leftovers(target: str) -> list[Leftover]:
    """The saves to a path that have not ended, see `native.in_store.leftovers`."""
    present = [entry.name for entry in storage.entries_or_none(target)]
    if not is_unfinished(present):
        return []
    owners = [owner for name in present if (owner := storage.names.attempt_id(name)) is not None]
    return [leftover(target, owner, read_lease(_lease_of(target, owner)), [target]) for owner in owners]
