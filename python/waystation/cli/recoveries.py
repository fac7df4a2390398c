"""What a launch knows of the failures of its program, and what the program tells of going on from memory.

The launch says when it saw a process fail, when the last one had ended, and when it started them again; the
program adds a line to a file beside the agent's store once it has come to its next step
(`waystation.memory.Recovery`). The file stays, as the store does; a launch reports the lines that were added
while it ran.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from waystation.cli.launched import Outcome
from waystation.memory import RECOVERY_VARIABLE


class Recoveries:
    """The starts of one launch, and the recoveries after them.

    Args:
        path: The file for them; None if there is no agent whose memory a program could go on from.

    Attributes:
        starts: For each start `started_at_s`, `failed_at_s` (the first failure, None if there was none) and
            `ended_at_s`, in seconds since 1970.
    """

    def __init__(self, path: Path | None) -> None:
        self.starts: list[dict[str, float | None]] = []
        self._path = path
        self._read_from = len(self._content())

    def environment(self) -> dict[str, str]:
        """What the processes are told that are started now."""
        if self._path is None:
            return {}
        told: dict[str, Any] = {"file": str(self._path)}
        if self.starts:
            before = self.starts[-1]
            told |= {name: before[name] for name in ("failed_at_s", "ended_at_s")}
            told["started_at_s"] = time.time()
        return {RECOVERY_VARIABLE: json.dumps(told)}

    def note(self, outcome: Outcome) -> None:
        """A start has come to its end."""

        def moment_s(ended_s: float | None) -> float | None:
            return None if ended_s is None else outcome.began_at_s + ended_s

        ended_s = [program.ended_s for program in outcome.programs if program.ended_s is not None]
        self.starts.append(
            {
                "started_at_s": outcome.began_at_s,
                "failed_at_s": None if outcome.first is None else moment_s(outcome.first.ended_s),
                "ended_at_s": moment_s(max(ended_s, default=None)),
            }
        )

    def found(self) -> list[dict[str, Any]]:
        """What was added to the file since this launch began."""
        recoveries = []
        for line in self._content()[self._read_from :].splitlines():
            with contextlib.suppress(ValueError):
                recoveries.append(json.loads(line))
        return recoveries

    def _content(self) -> bytes:
        if self._path is not None:
            with contextlib.suppress(OSError):
                return self._path.read_bytes()
        return b""


def sentence(recovery: dict[str, Any]) -> str:
    """A recovery, for people."""
    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in recovery["phases_s"].items())
    return f"went on from step {recovery['step']} in memory: {phases}"
