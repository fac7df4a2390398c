"""How much memory loaded tensors hold."""

from __future__ import annotations

from waystation import _native


def live_allocation_bytes() -> int:
    """Bytes of host memory that this library has given out, as tensors or otherwise, and not got back."""
    return int(_native.arena_statistics()["live_bytes"])
