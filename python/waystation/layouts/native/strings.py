"""Several strings of bytes as one, to be sent to other processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def join_strings(parts: Sequence[bytes]) -> bytes:
    """Strings of bytes as one."""
    head = np.array([len(parts), *(len(part) for part in parts)], "<i8")
    return b"".join([head.tobytes(), *parts])


def split_strings(data: bytes) -> list[bytes]:
    """The strings that `join_strings` has made one of."""
    count = int.from_bytes(data[:8], "little")
    parts, begin = [], 8 * (1 + count)
    for length in np.frombuffer(data[8:begin], "<i8").tolist():
        parts.append(data[begin : begin + length])
        begin += length
    return parts
