"""The processes of the program, as saves and loads see them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Collection

from waystation import coordination
from waystation._errors import InvalidInput

__all__ = [
    "is_pathways_backend",
    "is_primary_host",
    "process_count",
    "process_index",
    "sync_global_processes",
]

_DEADLINE_S = 300


def process_count() -> int:
    """How many processes the program has."""
    return coordination.current().process_count


def process_index() -> int:
    """Which of them this one is."""
    return coordination.current().process_index


def is_primary_host(primary_host: int | None) -> bool:
    """Whether this process is `primary_host`; None means that each is."""
    return primary_host is None or primary_host == process_index()


def is_pathways_backend() -> bool:
    """Whether JAX runs the program through Pathways; False if the program does not use JAX."""
    if "jax" not in sys.modules:
        return False
    from waystation.frameworks import jax_public

    return jax_public.is_pathways_backend()


async def sync_global_processes(
    key: str,
    *,
    operation_id: str,
    timeout: int | None = None,
    processes: Collection[int] | None = None,
    record_event_name: str = "/jax/checkpoint/sync_global_devices_duration_sec",
) -> None:
    """Waits until all processes are here. They all call it, in the same order among saves and loads (of the
    same processes, if they are not all).

    Args:
        key: What the processes wait for: the same in all of them.
        operation_id: Of which operation this is part: likewise.
        timeout: How many seconds to wait at most; None means 300.
        processes: Those that wait, and call it; None for all.
        record_event_name: Under this name JAX's monitoring is told how long it took.

    Raises:
        InvalidInput: `timeout` is not positive, or this process is not among `processes`.
        Unavailable: A process has died, or does not come.
    """
    current = coordination.current()
    if timeout is not None and timeout <= 0:
        raise InvalidInput(f"the timeout must be positive, not {timeout} seconds")
    chosen = set(range(current.process_count)) if processes is None else set(processes)
    if current.process_index not in chosen:
        raise InvalidInput(f"process {current.process_index} is to wait for processes {sorted(chosen)} only")
    if len(chosen) == 1:
        return
    begun = time.monotonic()
    what = f"wait at '[op={operation_id}] {key}'"
    session = current.open(
        what, deadline_s=timeout or _DEADLINE_S, primary=min(chosen), processes=sorted(chosen)
    )
    try:
        await asyncio.to_thread(session.barrier)
    finally:
        session.close()
    if "jax" in sys.modules:
        from waystation.frameworks import jax_public

        jax_public.record_duration(record_event_name, time.monotonic() - begun)
