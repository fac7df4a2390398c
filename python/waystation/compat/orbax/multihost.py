"""The processes of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from waystation import coordination
from waystation.coordination import jax_preemption
from waystation.frameworks import jax_public
from waystation.frameworks import jax_version0 as jax

__all__ = [
    "BarrierSyncFn",
    "broadcast_one_to_all",
    "get_barrier_sync_fn",
    "initialize_runtime_to_distributed_ids",
    "is_jax_distributed_client_initialized",
    "is_pathways_backend",
    "is_primary_host",
    "is_runtime_to_distributed_ids_initialized",
    "process_count",
    "process_index",
    "reached_preemption",
    "sync_global_devices",
    "sync_global_processes",
]

_DEADLINE_S = 300
is_pathways_backend: Callable[[], bool] = jax_public.is_pathways_backend
process_count: Callable[[], int] = jax.process_count
is_jax_distributed_client_initialized: Callable[[], bool] = jax.is_distributed


class BarrierSyncFn(Protocol):
    """Waits for the other processes."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits at a point of this name, for so many milliseconds at most."""
        ...


def process_index() -> int:
    """Which of the processes this one is."""
    return coordination.current().process_index


def is_primary_host(primary_host: int | None) -> bool:
    """Whether this process is the one that decides; None means that each is."""
    return primary_host is None or primary_host == process_index()


def sync_global_processes(
    name: str,
    *,
    timeout: int | None = None,
    processes: set[int] | None = None,
    barrier_sync_fn: Callable[..., None] | None = None,
    record_event_name: str = "/jax/checkpoint/sync_global_devices_duration_sec",
) -> None:
    """Waits until all processes are here. They all call it, in the same order among saves and restores.

    Args:
        name: What they wait for.
        timeout: For how many seconds at most; None for 300.
        processes: Those that wait; None for all.
        barrier_sync_fn: Called instead.
        record_event_name: Has no effect.

    Raises:
        Unavailable: A process has died, or does not come.
    """
    if barrier_sync_fn is not None:
        barrier_sync_fn(key=name, timeout_ms=(timeout or _DEADLINE_S) * 1000)
        return
    current = coordination.current()
    chosen = set(range(current.process_count)) if processes is None else set(processes)
    if len(chosen) == 1 or current.process_index not in chosen:
        return
    session = current.open(
        f"wait at '{name}'",
        deadline_s=timeout or _DEADLINE_S,
        primary=min(chosen),
        processes=sorted(chosen),
    )
    try:
        session.barrier()
    finally:
        session.close()


sync_global_devices = sync_global_processes


def get_barrier_sync_fn(*, processes: set[int] | None = None) -> BarrierSyncFn:
    """What waits for processes, by a name and a time in milliseconds."""

    def wait(*, key: str, timeout_ms: int) -> None:
        sync_global_processes(key, timeout=max(1, timeout_ms // 1000), processes=processes)

    return wait


def reached_preemption(step: int) -> bool:
    """Whether this is the step to save at because the program will be ended."""
    return jax_preemption.reached_sync_point(step)


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """The tree of one process, in all of them; by default that of process 0."""
    return jax.broadcast_one_to_all(in_tree, is_source=is_source)


def initialize_runtime_to_distributed_ids() -> None:
    """Does nothing: processes are known by what JAX calls them."""


def is_runtime_to_distributed_ids_initialized() -> bool:
    """True: nothing has to be initialized."""
    return True
