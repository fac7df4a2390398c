"""Bounds the host memory that a save takes beyond the state (`memory.write_concurrent_bytes`).

What makes up the bound: the blocks that the engine gathers arrays into and writes from, to which memory of
devices is copied as well; of an asynchronous save, the copies of what could change; and of one that
compresses, what that takes. Invariants: a bound never makes a save fail, whatever the size of an array; what
is given to one is taken from the other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from waystation._options import MemoryOptions, Options
from waystation.layouts.orbax.frame_limits import LEAST_BYTES as LEAST_FRAME_BYTES
from waystation.layouts.orbax.frame_limits import FrameLimits

LEAST_BYTES = 1 << 20  # a few blocks of the files, one of which has to be in memory as a whole
_STAGING_MOST_BYTES = 64 << 20  # as much as the engine ever takes


@dataclass(slots=True)
class WriteShares:
    """What may still be taken for what.

    Attributes:
        staging_bytes: For the engine's blocks; None leaves that to the engine.
        snapshot_bytes: For copies of what could change.
        is_bounded: Whether the save keeps to a bound on both together.
    """

    staging_bytes: int | None
    snapshot_bytes: int
    is_bounded: bool

    @classmethod
    def of(cls, options: MemoryOptions, *, with_snapshot: bool) -> WriteShares:
        """Divides the bound; without a snapshot the engine has all of it."""
        wanted, bound = options.snapshot_bytes, options.write_limit_bytes()
        if bound is None:
            return cls(None, _half_of_free_bytes() if wanted is None else wanted, is_bounded=False)
        limit = max(bound, LEAST_BYTES)
        if not with_snapshot:
            return cls(min(limit, _STAGING_MOST_BYTES), 0, is_bounded=True)
        staging = min(limit // 2, _STAGING_MOST_BYTES)
        rest = limit - staging
        return cls(staging, rest if wanted is None else min(rest, wanted), is_bounded=True)


def bound_engine(options: Options, shares: WriteShares) -> Options:
    """The options, with the engine's share among them."""
    if shares.staging_bytes is None:
        return options
    bounded = options.thawed()
    own = bounded.engine.staging_bytes
    bounded.engine.staging_bytes = shares.staging_bytes if own is None else min(own, shares.staging_bytes)
    return bounded.frozen()


def divided_with_frames(options: Options, bound_bytes: int) -> tuple[Options, FrameLimits]:
    """The options of a bounded save with half of its bound, and how it compresses within the other."""
    half = max(bound_bytes // 2, LEAST_FRAME_BYTES)
    halved = options.thawed()
    halved.memory.write_concurrent_bytes = half
    return halved.frozen(), FrameLimits.within(half)


def _half_of_free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
