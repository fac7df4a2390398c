"""Opens the sessions of saves, loads and deletions as the options of the program's processes say."""

from __future__ import annotations

from waystation import coordination
from waystation._options import Options
from waystation.coordination import Session


def open_session(what: str, options: Options, *, deadline_s: float | None = None) -> Session:
    """Opens the next session of all processes that take part.

    Args:
        what: The operation and its object.
        options: `multiprocessing` counts.
        deadline_s: How long one waits for another in it; by default as the options say.

    Raises:
        InvalidInput: The processes that are to take part lack this one, or the primary.
    """
    multiprocessing = options.multiprocessing
    return coordination.current().open(
        what,
        deadline_s=multiprocessing.deadline_s if deadline_s is None else deadline_s,
        primary=_primary(options),
        sequence=multiprocessing.barrier_sync_key_prefix or "",
        processes=multiprocessing.active_processes,
    )


def _primary(options: Options) -> int:
    primary, active = options.multiprocessing.primary_host, options.multiprocessing.active_processes
    if primary is None:  # each has a storage of its own, so that it does not matter who decides
        return min(active) if active else 0
    return primary


def is_primary(options: Options) -> bool:
    """Whether this process is the one that decides and that tells people."""
    return coordination.current().process_index == _primary(options)


def process_count(options: Options) -> int:
    """How many processes take part in what the program does with these options."""
    active = options.multiprocessing.active_processes
    return coordination.current().process_count if active is None else len(active)


def are_all(options: Options) -> bool:
    """Whether these are all that the program has."""
    active = options.multiprocessing.active_processes
    return active is None or len(active) == coordination.current().process_count
