"""Loads a checkpoint in a process of its own and prints what host memory that took beyond the result.

The first load is not measured: it starts what a process starts once (JAX, compiled functions, threads). Then
all free memory goes back to the system, the kernel forgets the peak, and the load is repeated. The peak is
that of the resident memory, so pages of the files count if they are mapped, and not if they are read.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax

import waystation
from waystation import _native
from waystation.frameworks import AbstractNumpy


def abstract_state(kind: str, path: str) -> Any:
    """None loads as saved; a dtype loads every array as a NumPy array of it."""
    if kind == "as_saved":
        return None
    return {
        name: AbstractNumpy(leaf.shape, kind) for name, leaf in waystation.metadata(path).metadata.items()
    }


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def give_back_free_memory() -> None:
    gc.collect()
    _native.trim_arena()
    ctypes.CDLL(None).malloc_trim(0)


def size(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, bytes) else int(leaf.nbytes)


def main(path: str, kind: str, limit: str) -> None:
    context = waystation.Context()
    context.memory.read_concurrent_bytes = None if limit == "none" else int(limit)
    abstract = abstract_state(kind, path)
    with context:
        waystation.load(path, abstract)
        give_back_free_memory()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        state = waystation.load(path, abstract)
        peak = status("VmHWM")
    result = sum(size(leaf) for leaf in jax.tree.leaves(state))
    sys.stdout.write(json.dumps({"result_bytes": result, "extra_bytes": peak - before - result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
