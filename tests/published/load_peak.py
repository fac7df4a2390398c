"""Loads a published model in a process of its own and prints what host memory that took beyond the arrays.

The first load is not measured: it starts what a process starts once. As in `tests/checkpoint/load_peak.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.checkpoint.load_peak import give_back_free_memory, status

from waystation.safetensors import load, stream


def consume(path: str, framework: Any, dtype: str | None, limit: int) -> int:
    """Streams all arrays and keeps none; returns the bytes of the largest."""
    most = 0
    for _, array in stream(path, framework=framework, dtype=dtype, memory_limit=limit):
        most = max(most, array.nbytes)
        del array
    return most


def main(path: str, kind: str, framework: Any, dtype: str, limit: str) -> None:
    arguments = path, framework, None if dtype == "none" else dtype, int(limit)

    def once() -> Any:
        if kind == "stream":
            return consume(*arguments)
        return load(path, framework=framework, dtype=arguments[2], memory_limit=arguments[3])

    once()
    give_back_free_memory()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = once()
    peak = status("VmHWM")
    held = result if kind == "stream" else sum(array.nbytes for array in result.values())
    sys.stdout.write(json.dumps({"held_bytes": held, "extra_bytes": peak - before - held}))


if __name__ == "__main__":
    main(*sys.argv[1:])
