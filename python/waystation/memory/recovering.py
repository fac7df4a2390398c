"""Follows a program from the opening of its memory tier to its first step, and keeps how long that took.

`waystation launch` says in the environment what it has seen of the failure, and in which file it will look
for the line that the primary process adds when it is over. Nothing here changes what is done, and nothing
that goes wrong here is told: it is for people who want to know where the time went.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import Any

from waystation.memory.agent import RECOVERY_VARIABLE
from waystation.training.recovery import Recovery

_OF_LAUNCH = ("failed_at_s", "ended_at_s", "started_at_s")


class Recovering:
    """The recovery of this process, if there is one."""

    def __init__(self) -> None:
        self._clocks_s = time.time(), time.monotonic()
        self._moments: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None
        self._has_stepped = False

    def _now_s(self) -> float:
        then_s, monotonic_s = self._clocks_s
        return then_s + time.monotonic() - monotonic_s

    def begins(self) -> None:
        """The tier is being opened."""
        self._moments = {"begun_at_s": self._now_s()}

    def is_prepared(self, transfer_s: float) -> None:
        """It is open; agents have brought shards for so long."""
        took_s = self._now_s() - self._moments["begun_at_s"]
        # The agents may have begun before this process asked them to.
        self._moments |= {"prepared_at_s": self._now_s(), "transfer_s": min(transfer_s, took_s)}

    def has_loaded(self, step: int, took_s: float, brought_s: float) -> None:
        """A version of an earlier program was loaded, which took so long until now."""
        now_s = self._now_s()
        self._loaded = {
            "step": step,
            "loading_at_s": now_s - took_s,
            "loaded_at_s": now_s,
            "brought_s": brought_s,
        }

    def steps(self, *, is_primary: bool) -> Recovery | None:
        """The program gives a step to be saved; returns its recovery, if that is the first after one."""
        if self._loaded is None:
            return None
        moments, self._loaded = self._moments | self._loaded, None
        told = _told()
        if not self._has_stepped:  # what the program goes back to later is not what it was started again for
            moments |= {name: told.get(name) for name in _OF_LAUNCH}
        self._has_stepped = True
        recovery = Recovery(**moments, stepped_at_s=self._now_s())
        if is_primary and "file" in told:
            _write(told["file"], recovery, told.get("launch"))
        return recovery


def _told() -> dict[str, Any]:
    """What the launch has said."""
    with contextlib.suppress(ValueError):
        told = json.loads(os.environ.get(RECOVERY_VARIABLE, ""))
        if isinstance(told, dict):
            return told
    return {}


def _write(path: str, recovery: Recovery, launch: object) -> None:
    line = json.dumps(dataclasses.asdict(recovery) | {"phases_s": recovery.phases_s, "launch": launch})
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.write(f"{line}\n")
