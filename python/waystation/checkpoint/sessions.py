"""Sessions as the options want them: who decides, how long they wait, in which sequence they come."""

from __future__ import annotations

from waystation import coordination
from waystation._options import Options
from waystation.coordination import Session


def open_session(what: str, options: Options, *, deadline_s: float | None = None) -> Session:
    """Opens the next session of all processes.

    Args:
        what: The operation and its object.
        options: In effect for it.
        deadline_s: How long a round may wait, in seconds; by default as the options say.
    """
    multiprocessing = options.multiprocessing
    return coordination.current().open(
        what,
        deadline_s=multiprocessing.deadline_s if deadline_s is None else deadline_s,
        primary=multiprocessing.primary_host or 0,
        sequence=multiprocessing.barrier_sync_key_prefix or "",
    )
