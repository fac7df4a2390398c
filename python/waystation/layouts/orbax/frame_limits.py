"""What compressing arrays may take of host memory, and how that cuts them.

In memory at a time are the frames of two batches, one on its way to the disk and one being made, copies of
what one batch has in the memory of devices, and for each thread that compresses what its compressor needs
and, where an array is not contiguous, a copy of its chunk.
Invariants: all of that stays within the limit, however large an array is, unless the caller asks for larger
chunks: what becomes one frame is in memory as a whole; a limit so small that nothing could be done within
it is raised to one in which something can.
"""

from __future__ import annotations

from dataclasses import dataclass

from waystation.layouts.orbax.write_grid import COMPRESSED_CHUNK_BYTES

LEAST_BYTES = 2 << 20
_BATCH_BYTES = 64 << 20
# What zstd takes at the levels that are used.
_COMPRESSOR_BYTES = 3 << 19


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """How arrays are compressed.

    Attributes:
        chunk_bytes: The largest chunk where the caller does not say how large.
        batch_bytes: Chunks of about so many bytes are compressed together, at least one.
        thread_bytes: Memory for all threads that compress; None is no limit.
    """

    chunk_bytes: int = COMPRESSED_CHUNK_BYTES
    batch_bytes: int = _BATCH_BYTES
    thread_bytes: int | None = None

    @classmethod
    def within(cls, limit_bytes: int) -> FrameLimits:
        """Limits that together keep to one."""
        half = max(limit_bytes, LEAST_BYTES) // 2
        return cls(min(COMPRESSED_CHUNK_BYTES, half // 4), min(_BATCH_BYTES, half // 3), half)

    def threads(self, chunk_bytes: int) -> int | None:
        """How many threads may compress chunks of so many bytes; None is as many as there are cores."""
        if self.thread_bytes is None:
            return None
        return max(1, self.thread_bytes // (chunk_bytes + _COMPRESSOR_BYTES))
