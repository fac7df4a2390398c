"""Saves and loads arrays of a host, together with the other hosts that hold shards of them.

To `waystation.save` and `load` they are one program of several processes: the coordination service of their
island carries the rounds, and each host moves the bytes of its own shards between its devices and storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from waystation import checkpoint
from waystation.runtime.messages import Load, Save


def begin_save(instruction: Save, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Begins a save; what it returns waits until it is committed.

    From then on arrays may be donated: what is saved is what they are now.

    Raises:
        WaystationError: It cannot be saved.
    """
    with _context(instruction.processes):
        saving = checkpoint.save_async(instruction.path, dict(arrays), overwrite=instruction.overwrite)

    def finish() -> None:
        saving.result()

    return finish


def load(instruction: Load, shardings: Mapping[str, jax.sharding.Sharding]) -> dict[str, jax.Array]:
    """Loads arrays.

    Raises:
        WaystationError: There is no such checkpoint, or it has other arrays.
    """
    wanted: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=shardings[name])
        for name, _, value, _ in instruction.arrays
    }
    with _context(instruction.processes):
        loaded: dict[str, jax.Array] = checkpoint.load(instruction.path, wanted)
    return loaded


def _context(processes: tuple[int, ...]) -> checkpoint.Context:
    context = checkpoint.Context()
    if jax.process_count() > 1:
        context.multiprocessing.active_processes = frozenset(processes)
        context.multiprocessing.primary_host = processes[0]
        # Hosts of several slices may save at the same time, each set of them in an order of its own.
        context.multiprocessing.barrier_sync_key_prefix = "runtime-" + "-".join(map(str, processes))
    return context
