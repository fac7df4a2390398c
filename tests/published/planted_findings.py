"""Watched executions of which one goes wrong in a way that is asked for; prints what the watch says.

`python -m tests.published.planted_findings HOW`. A program of its own, since it forks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from fuzz import watched

WRONG = 1000
FIRST = 10


def _wait() -> None:
    time.sleep(600)


def _spin() -> None:
    while True:
        pass


def _hold() -> None:
    bytearray(b"x") * (64 << 20)


def _claim() -> None:
    bytearray(1 << 33)


def _fail() -> None:
    raise KeyError("planted")


HOW: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "waits": _wait,
    "spins": _spin,
    "crashes": os.abort,
    "is killed": lambda: os.kill(os.getpid(), 9),
    "holds much": _hold,
    "claims much": _claim,
    "fails": _fail,
    "exits": lambda: os._exit(0),
}


class Planted:
    """Does what is asked for in one execution."""

    most_bytes = 0

    def __init__(self, how: str) -> None:
        self._how = HOW[how]
        self._count = 0

    def __call__(self, number: int) -> None:
        self._count += 1
        if number == WRONG:
            self._how()

    def summary(self) -> dict[str, Any]:
        """How many were run."""
        return {"run": self._count}


def main(how: str) -> None:
    outcome = watched.watch(lambda: Planted(how), FIRST, watched.Limits(2000, hang_s=2.0))
    sys.stdout.write(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    main(sys.argv[1])
