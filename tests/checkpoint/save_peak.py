"""Saves a state and returns what host memory that took beyond the state.

The first save, of a few leaves, is not measured: it starts what a process starts once (JAX, threads,
rings). Then all free memory goes back to the system, the kernel forgets the peak, and another save is made.
What can be overwritten is, as soon as the save allows it; afterwards the checkpoint is loaded and compared.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.long import amount
from tests.support.peaks import begin_peak, status

import waystation

MIB = 1 << 20
# Far more than what the bounds allow: an array that stays where it should not is seen.
ARRAYS = amount(40, 150)


def make(kind: str) -> list[Any]:
    """The leaves of a state: arrays of 4 MB, or one of 128 MiB; fewer of random bytes."""
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

        return [jnp.full((1024, 1024), number, jnp.float32) for number in range(ARRAYS)]
    if kind == "torch":
        import torch

        return [torch.full((1024, 1024), number, dtype=torch.float32) for number in range(ARRAYS)]
    return [np.full((1024, 1024), number, np.float32) for number in range(ARRAYS)]


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


def extra_bytes(
    directory: Path, kind: str, mode: str, limit_bytes: int | None, saving: dict[str, Any]
) -> int:
    """The peak of resident memory during a save with options of `array.saving`, beyond the state."""
    context = waystation.Context()
    context.memory.write_concurrent_bytes = limit_bytes
    context.engine.block_bytes = 16 * MIB  # more than the bounds of the tests
    for name, value in saving.items():
        setattr(context.array.saving, name, value)
    leaves = make(kind)
    expected = [digest(leaf) for leaf in leaves]
    in_background = mode == "save_async"
    with context:
        save(directory / "first", leaves[:8], in_background=in_background, overwrite_leaves=False)
        before = begin_peak()
        path = directory / "second"
        peak = save(path, leaves, in_background=in_background, overwrite_leaves=True)
    for value, array in zip(expected, waystation.load(path), strict=True):
        assert digest(array) == value
    return peak - before
