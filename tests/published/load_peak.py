"""Loads a published model and returns what host memory that took beyond the arrays.

The first load is not measured: it starts what a process starts once. As in `tests/checkpoint/load_peak.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import s3
from tests.support.peaks import begin_peak, status

import waystation
from waystation.safetensors import load, stream


def consume(path: Path | str, framework: Any, dtype: str | None, limit: int) -> int:
    """Streams all arrays and keeps none; returns the bytes of the largest."""
    most = 0
    for _, array in stream(path, framework=framework, dtype=dtype, memory_limit=limit):
        most = max(most, array.nbytes)
        del array
    return most


def held_and_extra_bytes(
    path: Path | str, kind: str, framework: Any, dtype: str | None, limit: int
) -> tuple[int, int]:
    """The bytes of what is held in the end, or at once by a stream, and the peak beyond them."""

    def once() -> Any:
        if kind == "stream":
            return consume(path, framework, dtype, limit)
        return load(path, framework=framework, dtype=dtype, memory_limit=limit)

    once()
    before = begin_peak()
    result = once()
    peak = status("VmHWM")
    held = result if kind == "stream" else sum(array.nbytes for array in result.values())
    return held, peak - before - held


def from_store(endpoint: str, location: str, framework: Any, limit: int) -> tuple[int, int]:
    """The same of a load of a model in an object store."""
    with s3.context(endpoint):
        return held_and_extra_bytes(location, "load", framework, None, limit)


def kept_and_released_bytes(path: Path) -> tuple[int, int, int]:
    """What a process keeps of the arrays that it has dropped, what it says that it gives back then, and what
    it has kept after that."""
    load(path, framework="numpy", select="w1")
    before = begin_peak()
    load(path, framework="numpy")
    kept = status("VmRSS") - before
    released = waystation.release_memory()
    return kept, released, status("VmRSS") - before
