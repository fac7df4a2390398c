"""Takes `renameat2` with flags away from a process, as file systems do that have no such renames.

EINVAL is what the kernel says for a file system without the operation. How long it holds: `failing_calls`.
"""

from __future__ import annotations

import errno

from tests.support import failing_calls

SUPPORTED = failing_calls.SUPPORTED
_FLAGS = 4


def allow_only_plain_renames() -> None:
    """From now on, renames that must not replace anything, and swaps, fail with EINVAL."""
    failing_calls.fail("renameat2", errno.EINVAL, unless_zero=_FLAGS)
