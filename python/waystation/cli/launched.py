"""What became of the processes that a launch has started."""

from __future__ import annotations

import signal
import subprocess
from collections import deque
from dataclasses import dataclass, field
from typing import Any

KEPT_LINES = 12


@dataclass
class Program:
    """One process of the program.

    Attributes:
        index: Which of them it is.
        process: Its handle.
        exit_code: What it returned; negative is the signal that killed it; None while it runs.
        ended_s: When it ended, in seconds since the launch.
        told_to_end: The signal that the launcher had sent it by then.
        last_lines: The end of its output.
    """

    index: int
    process: subprocess.Popen[bytes]
    exit_code: int | None = None
    ended_s: float | None = None
    told_to_end: signal.Signals | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    @property
    def process_id(self) -> int:
        """The operating system's number of it."""
        return self.process.pid

    @property
    def failed(self) -> bool:
        """Whether it ended, and not well."""
        return self.exit_code not in (None, 0)

    @property
    def signal_name(self) -> str | None:
        """The signal that killed it, if one did."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


@dataclass
class Outcome:
    """How a launch went.

    Attributes:
        programs: All processes, by their index.
        first: The one that failed first, if any failed.
        passed_on: The first signal to the launcher, if there was one.
        began_at_s: When it began, in seconds since 1970.
        stopped: Why others have ended it, if they did before anything failed here.
    """

    programs: list[Program]
    first: Program | None
    passed_on: signal.Signals | None
    began_at_s: float
    stopped: str | None = None


def describe(program: Program) -> dict[str, Any]:
    """A process, for a JSON document."""
    return {
        "index": program.index,
        "pid": program.process_id,
        "exit_code": program.exit_code if program.signal_name is None else None,
        "signal": program.signal_name,
        "ended_s": program.ended_s,
        "told_to_end": None if program.told_to_end is None else program.told_to_end.name,
        "last_lines": list(program.last_lines),
    }
