"""`delete`: removes a checkpoint in one visible act."""

from __future__ import annotations

import os

from waystation import coordination
from waystation.checkpoint.context import current_options
from waystation.checkpoint.paths import PathLike, require_checkpoint, resolve
from waystation.layouts.native import commit
from waystation.layouts.native.attempts import new_attempt_id

_DELETED = b"deleted"


def delete(path: PathLike, *, missing_ok: bool = False) -> bool:
    """Removes a checkpoint.

    In a program of several processes all call it, and the primary does it.

    It stops being a checkpoint in one atomic step; only then are its files removed, so a crash leaves
    it whole or gone.

    Args:
        path: The checkpoint.
        missing_ok: Return False instead of raising when there is nothing at `path`.

    Returns:
        Whether there was a checkpoint.

    Raises:
        NotFound: There is nothing at `path`.
        InvalidInput: What is there is not a checkpoint; it is left alone.
    """
    target = resolve(path)
    multiprocessing = current_options().multiprocessing
    session = coordination.current().open(
        f"delete '{target}'", deadline_s=multiprocessing.deadline_s, primary=multiprocessing.primary_host
    )
    try:
        return session.round(lambda: b"", lambda _: _delete(target, missing_ok=missing_ok)) == _DELETED
    finally:
        session.close()


def _delete(target: str, *, missing_ok: bool) -> bytes:
    if missing_ok and not os.path.lexists(target):
        return b"absent"
    require_checkpoint(target)
    commit.withdraw(target, new_attempt_id())
    return _DELETED
