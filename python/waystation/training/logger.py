"""What a `Checkpointer` tells of each save and load, and to whom."""

from __future__ import annotations

import logging
from typing import Any, Protocol

_log = logging.getLogger("waystation")


class Logger(Protocol):
    """Is told of each save and load."""

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Takes one entry: a dict with `event_type` (`save` or `restore`), `step`, `directory`, and what the
        call took of the program's time, in seconds (`blocking_s`). The memory tier adds `memory_restore`, and
        `memory_failure` with `failure` in place of the time."""
        ...


class StandardLogger:
    """Writes entries to the log `waystation`."""

    def log_entry(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Writes an entry, at level INFO."""
        _log.info("%s", msg)
