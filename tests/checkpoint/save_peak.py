"""Saves a state in a process of its own and prints what host memory that took beyond the state.

The first save, of a few leaves, is not measured: it starts what a process starts once (JAX, threads,
rings). Then all free memory goes back to the system, the kernel forgets the peak, and another save is made.
What can be overwritten is, as soon as the save allows it; afterwards the checkpoint is loaded and compared.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tests.checkpoint.load_peak import give_back_free_memory, status

import waystation

MIB = 1 << 20


def make(kind: str) -> list[Any]:
    """The leaves of a state: the guide's 150 arrays of 4 MB, or one of 128 MiB; fewer of random bytes."""
    random = np.random.default_rng(0)
    if kind == "numpy-one":
        return [np.full((128, MIB // 4), 7, np.float32)]
    if kind == "random-one":
        return [np.frombuffer(bytearray(random.bytes(64 * MIB)), np.int16).reshape(64, MIB // 2)]
    if kind == "random":
        return [np.frombuffer(bytearray(random.bytes(4 * MIB)), np.float32) for _ in range(16)]
    if kind == "random-strided":
        arrays = (np.frombuffer(bytearray(random.bytes(4 * MIB)), np.float32) for _ in range(16))
        return [array.reshape(1024, 1024).T for array in arrays]
    if kind == "jax":
        import jax.numpy as jnp

        return [jnp.full((1024, 1024), number, jnp.float32) for number in range(150)]
    if kind == "torch":
        import torch

        return [torch.full((1024, 1024), number, dtype=torch.float32) for number in range(150)]
    return [np.full((1024, 1024), number, np.float32) for number in range(150)]


def save(path: Path, leaves: list[Any], *, in_background: bool, overwrite_leaves: bool) -> int:
    """Saves; returns the peak of resident memory until then."""
    if in_background:
        response = waystation.save_async(path, leaves)
        for leaf in leaves if overwrite_leaves else ():
            if not hasattr(leaf, "sharding"):
                leaf[...] = -1
        response.result()
    else:
        waystation.save(path, leaves)
    return status("VmHWM")


def digest(leaf: Any) -> int:
    """Of the bytes of a leaf in C order."""
    return zlib.crc32(np.ascontiguousarray(leaf))


def main(directory: str, kind: str, mode: str, limit: str, saving: str = "{}") -> None:
    context = waystation.Context()
    context.memory.write_concurrent_bytes = None if limit == "none" else int(limit)
    context.engine.block_bytes = 16 * MIB  # more than the bounds of the tests
    for name, value in json.loads(saving).items():
        setattr(context.array.saving, name, value)
    leaves = make(kind)
    expected = [digest(leaf) for leaf in leaves]
    in_background = mode == "save_async"
    with context:
        save(Path(directory, "first"), leaves[:8], in_background=in_background, overwrite_leaves=False)
        give_back_free_memory()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        path = Path(directory, "second")
        peak = save(path, leaves, in_background=in_background, overwrite_leaves=True)
    for value, array in zip(expected, waystation.load(path), strict=True):
        assert digest(array) == value
    sys.stdout.write(json.dumps({"extra_bytes": peak - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
