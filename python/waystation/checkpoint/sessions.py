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
    active = multiprocessing.active_processes
    primary = multiprocessing.primary_host
    if primary is None:  # each has a storage of its own, so that it does not matter who decides
        primary = 0 if not active else min(active)
    return coordination.current().open(
        what,
        deadline_s=multiprocessing.deadline_s if deadline_s is None else deadline_s,
        primary=primary,
        sequence=multiprocessing.barrier_sync_key_prefix or "",
        processes=active,
    )


def process_count(options: Options) -> int:
    """How many processes take part in what the program does with these options."""
    active = options.multiprocessing.active_processes
    return coordination.current().process_count if active is None else len(active)


def are_all(options: Options) -> bool:
    """Whether these are all that the program has."""
    active = options.multiprocessing.active_processes
    return active is None or len(active) == coordination.current().process_count
