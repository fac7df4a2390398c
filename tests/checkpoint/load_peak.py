"""Loads a checkpoint and returns what host memory that took beyond the result.

The first load is not measured: it starts what a process starts once (JAX, compiled functions, threads). Then
all free memory goes back to the system, the kernel forgets the peak, and the load is repeated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from tests.support.peaks import begin_peak, status

import waystation
from waystation.frameworks import AbstractNumpy


def abstract_state(kind: str, path: Path) -> Any:
    """None loads as saved; a dtype loads every array as a NumPy array of it."""
    if kind == "as_saved":
        return None
    return {
        name: AbstractNumpy(leaf.shape, kind) for name, leaf in waystation.metadata(path).metadata.items()
    }


def size(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, bytes) else int(leaf.nbytes)


def extra_bytes(path: Path, kind: str, limit_bytes: int | None) -> int:
    """The peak of resident memory during a load, beyond the result."""
    context = waystation.Context()
    context.memory.read_concurrent_bytes = limit_bytes
    abstract = abstract_state(kind, path)
    with context:
        waystation.load(path, abstract)
        before = begin_peak()
        state = waystation.load(path, abstract)
        peak = status("VmHWM")
    return peak - before - sum(size(leaf) for leaf in jax.tree.leaves(state))


def extra_bytes_in_place(path: Path, framework: str) -> int:
    """The peak of resident memory during a load into arrays that are there, beyond these."""
    own = {name: np.ones(leaf.shape, leaf.dtype) for name, leaf in waystation.metadata(path).metadata.items()}
    context = waystation.Context()
    context.array.loading.in_place = True
    context.memory.read_concurrent_bytes = 8 << 20  # for what the disk wants at the start of pages
    state = {name: torch.from_numpy(array) for name, array in own.items()} if framework == "torch" else own
    with context:
        waystation.load(path, state)
        before = begin_peak()
        waystation.load(path, state)
        peak = status("VmHWM")
    return peak - before
