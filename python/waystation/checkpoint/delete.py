"""`delete`: removes a checkpoint in one visible act."""

from __future__ import annotations

import os

from waystation.checkpoint.paths import PathLike, require_checkpoint, resolve
from waystation.layouts.native import commit
from waystation.layouts.native.attempts import new_attempt_id


def delete(path: PathLike, *, missing_ok: bool = False) -> bool:
    """Removes a checkpoint.

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
    if missing_ok and not os.path.lexists(target):
        return False
    require_checkpoint(target)
    commit.withdraw(target, new_attempt_id())
    return True
