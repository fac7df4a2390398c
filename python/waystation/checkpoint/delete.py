"""`delete`: removes a checkpoint in one visible act."""

from __future__ import annotations

import os
from collections.abc import Sequence

from waystation import coordination
from waystation._errors import NotFound
from waystation.checkpoint import local_storage
from waystation.checkpoint.context import current_options
from waystation.checkpoint.paths import PathLike, require_checkpoint, resolve
from waystation.coordination import Session
from waystation.layouts.native import commit
from waystation.layouts.native.attempts import new_attempt_id

_DELETED, _ABSENT = b"deleted", b"absent"


def delete(path: PathLike, *, missing_ok: bool = False) -> bool:
    """Removes a checkpoint.

    In a program of several processes all call it, and the primary does it; with local storage
    (`multiprocessing.primary_host = None`) each removes its own part.

    It stops being a checkpoint in one atomic step; only then are its files removed, so a crash leaves
    it whole or gone. Of parts in local storage a crash may leave some, which another call removes.

    Args:
        path: The checkpoint.
        missing_ok: Return False instead of raising when there is nothing at `path`.

    Returns:
        Whether there was a checkpoint (with local storage, in any process).

    Raises:
        NotFound: There is nothing at `path`.
        InvalidInput: What is there is not a checkpoint; it is left alone.
    """
    target = resolve(path)
    multiprocessing = current_options().multiprocessing
    is_local = multiprocessing.primary_host is None
    session = coordination.current().open(
        "delete from local storage" if is_local else f"delete '{target}'",
        deadline_s=multiprocessing.deadline_s,
        primary=multiprocessing.primary_host or 0,
    )
    try:
        if is_local:
            return _delete_parts(session, target, missing_ok=missing_ok)
        return session.round(lambda: b"", lambda _: _delete(target, missing_ok=missing_ok)) == _DELETED
    finally:
        session.close()


def _delete(target: str, *, missing_ok: bool) -> bytes:
    if missing_ok and not os.path.lexists(target):
        return _ABSENT
    require_checkpoint(target)
    commit.withdraw(target, new_attempt_id())
    return _DELETED


def _delete_parts(session: Session, target: str, *, missing_ok: bool) -> bool:
    local_storage.settle(session, target)

    def look() -> bytes:
        if not os.path.lexists(target):
            return _ABSENT
        require_checkpoint(target)
        return b""

    def decide(parts: Sequence[bytes]) -> bytes:
        if set(parts) != {_ABSENT}:
            return b""
        if not missing_ok:
            raise NotFound(f"no process has a checkpoint at its path, such as '{target}'", path=target)
        return _ABSENT

    def work() -> bytes:
        if os.path.lexists(target):
            commit.withdraw(target, new_attempt_id())
        return b""

    # Nothing is removed before every process has found that it may be.
    if session.round(look, decide) == _ABSENT:
        return False
    session.round(work, local_storage.nothing)
    return True
