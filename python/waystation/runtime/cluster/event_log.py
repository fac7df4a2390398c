"""The log of a cluster's manager: a file that stays, whatever ends the manager and its Ray.

The manager writes what happens to programs and islands, and what fails in its event loop where nobody waits
for it: in tasks, timers and connections. A manager that is killed writes no more, so programs
that lose it append that. Each manager has a file of its own, in `$XDG_STATE_HOME/waystation/runtime` or,
where that cannot be written, in the directory for temporary files; the newest are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import tempfile
import time
from pathlib import Path
from typing import Any

_MOST_FILES = 32
_MOST_BYTES = 1 << 20
_FORMAT = "%(asctime)s %(message)s"


class EventLog:
    """The log of this process.

    Attributes:
        path: Where it is; empty where none can be written.
    """

    def __init__(self) -> None:
        self.path: str = ""
        self._log = logging.getLogger("waystation.runtime.manager")
        self._log.setLevel(logging.INFO)
        self._log.propagate = False
        self._handler: logging.Handler | None = None
        for directory in _directories():
            path = directory / f"manager-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
            with contextlib.suppress(OSError):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                _remove_oldest(directory)
                handler = logging.handlers.RotatingFileHandler(path, maxBytes=_MOST_BYTES, backupCount=1)
                handler.setFormatter(logging.Formatter(_FORMAT))
                self._log.addHandler(handler)
                self._handler = handler
                self.path = str(path)
                return

    def write(self, event: str) -> None:
        """Says what has happened."""
        self._log.info("%s", event)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Says, from now on, what fails in an event loop where nobody waits for it; so does the loop."""

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            self._log.error("%s", context["message"], exc_info=context.get("exception"))
            loop.default_exception_handler(context)

        loop.set_exception_handler(failed)

    def close(self) -> None:
        """Ends it; the file stays."""
        if self._handler is not None:
            self._log.removeHandler(self._handler)
            self._handler.close()


def append(path: str, event: str) -> None:
    """Says in the log of another process what has happened, where that is on this machine."""
    if Path(path).is_file():
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as opened:
            opened.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {event}\n")


def _directories() -> tuple[Path, Path]:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state, "waystation", "runtime"), Path(
        tempfile.gettempdir(), f"waystation-runtime-{os.getuid()}"
    )


def _remove_oldest(directory: Path) -> None:
    found = sorted(directory.glob("manager-*.log*"), key=lambda path: path.stat().st_mtime)
    for path in found[: 1 - _MOST_FILES]:
        path.unlink(missing_ok=True)
