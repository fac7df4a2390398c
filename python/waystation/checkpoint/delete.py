"""`delete`: removes a checkpoint, or one checkpointable of it, in one visible act."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from waystation import storage
from waystation._errors import (
    CheckpointableNotFound,
    CheckpointNotFound,
    InvalidInput,
    InvalidLayoutError,
    Unsupported,
    UnusablePath,
    WrongType,
)
from waystation._options.in_effect import current_options
from waystation.checkpoint import local_storage, opening
from waystation.checkpoint.handlers.choice import METRICS
from waystation.checkpoint.paths import PathLike, dead_link, is_absent, locate
from waystation.checkpoint.save import check_names
from waystation.checkpoint.sessions import open_session
from waystation.layouts.native import commit, names
from waystation.layouts.orbax import checkpoint as orbax
from waystation.layouts.orbax import deletion
from waystation.layouts.orbax import in_store as orbax_in_store
from waystation.storage.attempts import new_attempt_id
from waystation.transfers.handle import AsyncResponse

_DELETED, _ABSENT = b"deleted", b"absent"


def delete(path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
    """Removes a checkpoint, or one checkpointable of it.

    In a program of several processes all call it, and the primary does it; with local storage
    (`multiprocessing.primary_host = None`) each removes its own part.

    It stops being there in one atomic step; only then are its files removed, so a crash leaves it whole or
    gone. Of parts in local storage a crash may leave some, which another call removes; so it does with what a
    deletion by Orbax has left that did not end. The other checkpointables can be loaded all the time; who is
    loading the one that is deleted gets an error.

    It acts on what is committed: a save in the background that has not ended goes on, and commits later.

    Args:
        path: The checkpoint.
        checkpointable_name: Which checkpointable; None for the whole checkpoint.
        missing_ok: Return False instead of raising when it is not there.

    Returns:
        Whether it was there (with local storage, in any process).

    Raises:
        CheckpointNotFound: There is nothing at `path`.
        CheckpointableNotFound: The checkpoint has no such checkpointable.
        Conflict: In an object store, another version has taken its place meanwhile, and stays.
        InvalidInput: What is there is not a checkpoint, but a part of one, or something else; it is left
            alone. Or the checkpointable is the last one, but for metrics: delete the checkpoint then.
        DeletionRecoveryError: The deletion of another checkpointable has begun and has not ended.
    """
    return _Deletion(path, checkpointable_name, missing_ok=missing_ok).run()


def delete_async(
    path: PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> AsyncResponse[bool]:
    """Removes a checkpoint, or one checkpointable of it, in the background; takes what `delete` takes."""
    deletion = _Deletion(path, checkpointable_name, missing_ok=missing_ok)
    return AsyncResponse(f"deleting '{deletion.target}'", lambda _: deletion.run())


class _Deletion:
    """One deletion, of all processes.

    Attributes:
        target: The checkpoint, resolved.
    """

    def __init__(self, path: PathLike, name: str | None, *, missing_ok: bool) -> None:
        for value, kind in ((name, str | None), (missing_ok, bool)):
            if not isinstance(value, kind):
                raise WrongType(f"{value!r} is a {type(value).__name__} where {kind} is wanted")
        if name is not None:
            if not name or name in {".", ".."} or set(name) & {"/", "\\", "\0"}:
                raise InvalidInput(f"{name!r} cannot be the name of a checkpointable")
            check_names([name])
        self.target = locate(path)
        self._name = name
        self._missing_ok = missing_ok
        self._is_orbax = False
        options = current_options()
        self._is_local = options.multiprocessing.primary_host is None
        what = "" if name is None else f" checkpointable '{name}' of"
        where = "from local storage" if self._is_local else f"'{self.target}'"
        self._session = open_session(f"delete{what} {where}", options)

    def run(self) -> bool:
        """Deletes; returns whether there was something to delete."""
        try:
            if self._is_local:
                return self._delete_parts()
            return self._session.round(lambda: b"", lambda _: self._delete_one()) == _DELETED
        finally:
            self._session.close()

    def _delete_one(self) -> bytes:
        if self._look() == _ABSENT:
            if not self._missing_ok:
                self._raise_absent()
            return _ABSENT
        self._withdraw()
        return _DELETED

    def _delete_parts(self) -> bool:
        local_storage.settle(self._session, self.target)

        def decide(parts: Sequence[bytes]) -> bytes:
            if set(parts) != {_ABSENT}:
                return b""
            if not self._missing_ok:
                self._raise_absent()
            return _ABSENT

        def work() -> bytes:
            if self._look() != _ABSENT:
                self._withdraw()
            return b""

        # Nothing is removed before every process has found that it may be.
        if self._session.round(self._look, decide) == _ABSENT:
            return False
        self._session.round(work, local_storage.nothing)
        return True

    def _look(self) -> bytes:
        """Finds out whether it is there; refuses what must not be deleted."""
        if is_absent(self.target):
            return _ABSENT
        found = storage.status(self.target, follow_links=False)
        if (problem := dead_link(self.target)) is not None:
            raise UnusablePath(
                f"'{self.target}' is {problem}, and no checkpoint; remove it with os.unlink", path=self.target
            )
        if found is not None and found.kind == "link":
            raise InvalidInput(
                f"'{self.target}' is a symbolic link; delete the checkpoint by its own path, "
                f"'{storage.resolved(self.target)}'",
                path=self.target,
            )
        self._is_orbax = opening.recognise(self.target) == "orbax"
        if self._is_orbax and orbax.is_checkpointable(self.target):
            raise InvalidLayoutError(
                f"'{self.target}' is a part of checkpoint '{os.path.dirname(self.target)}'; delete it from "
                "that: delete(path, checkpointable_name=…)",
                path=self.target,
            )
        if self._name is None:
            return b""
        if self._is_orbax and storage.of(self.target).renames is None:
            raise Unsupported(
                f"'{self.target}' is in Orbax's layout, of which a store cannot remove one checkpointable in "
                "one act; delete the checkpoint, or save it without that checkpointable to another path",
                path=self.target,
            )
        present = self._present()
        if self._name not in present:
            return _ABSENT
        if not set(present) - {self._name, METRICS}:  # metrics alone are no checkpoint
            raise InvalidInput(
                f"'{self._name}' is the last checkpointable of '{self.target}'; delete the checkpoint: "
                "delete(path)",
                path=self.target,
            )
        return b""

    def _raise_absent(self) -> None:
        if self._is_local and self._name is None:
            raise CheckpointNotFound(
                f"no process has a checkpoint at its path, such as '{self.target}'", path=self.target
            )
        opening.recognise(self.target)
        if self._name is None:
            raise CheckpointNotFound(
                f"there was no checkpoint at '{self.target}', and one has come since, which stays; delete it "
                "again if that one is to go",
                path=self.target,
            )
        present = ", ".join(sorted(self._present()))
        raise CheckpointableNotFound(
            f"checkpoint '{self.target}' has no checkpointable '{self._name}'; it has: {present}",
            path=self.target,
        )

    def _present(self) -> Collection[str]:
        """The checkpointables that are there; the one that is to go as well if its deletion has begun."""
        if not self._is_orbax:
            return commit.read_record(self.target).present(self.target)
        assert self._name is not None, "nobody asks otherwise"
        found = orbax.open_checkpoint(self.target)
        record = deletion.read_record(self.target)
        if record is None:
            return found.items
        deletion.require_deletion_of(record, self._name, self.target)
        return {*found.items, self._name}

    def _withdraw(self) -> None:
        if self._name is None:
            withdraw(self.target)
        elif self._is_orbax:
            deletion.delete(self.target, self._name, new_attempt_id())
        else:
            commit.withdraw_checkpointable(self.target, self._name, new_attempt_id())


def withdraw(target: str, *, created_ns: int | None = None) -> None:
    """Removes the checkpoint at a path in one visible act, whatever its layout; see `commit.withdraw`."""
    is_native = storage.is_there(os.path.join(target, names.RECORD))
    if is_native or storage.of(target).renames is not None:
        commit.withdraw(target, new_attempt_id(), created_ns=created_ns)
    else:
        orbax_in_store.withdraw(target)
