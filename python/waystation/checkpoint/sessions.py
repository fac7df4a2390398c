"""Opens the sessions of saves, loads and deletions as the options of the program's processes say."""

from __future__ import annotations

from waystation import coordination
from waystation._errors import Unsupported
from waystation._options import Options
from waystation.coordination import Session


def open_session(what: str, options: Options, *, deadline_s: float | None = None) -> Session:
    """Opens the next session of all processes.

    Args:
        what: The operation and its object.
        options: `multiprocessing` counts.
        deadline_s: How long one waits for another in it; by default as the options say.

    Raises:
        Unsupported: Only some of the processes are to take part.
    """
    multiprocessing = options.multiprocessing
    coordinator = coordination.current()
    active = multiprocessing.active_processes
    if active is not None and set(active) != set(range(coordinator.process_count)):
        raise Unsupported(
            f"{what}: multiprocessing.active_processes are {sorted(active)}, of {coordinator.process_count} "
            "processes; all of them take part in saves and loads: leave the option as it is (None), and have "
            "processes without a part of the state pass the same tree"
        )
    return coordinator.open(
        what,
        deadline_s=multiprocessing.deadline_s if deadline_s is None else deadline_s,
        primary=multiprocessing.primary_host or 0,
        sequence=multiprocessing.barrier_sync_key_prefix or "",
    )
