"""What happened in a run with failures, and whether it may have.

The laws: what is restored is, to the bit, a state of the uninterrupted run; all processes restore the same
step; a program advances by single steps. Unless as many hosts were lost as there are copies, a program is in
a later epoch than those before it, and restores no older step than one that was said to be kept. It is told
that nothing is left only if as many hosts were lost, and nothing was written to the directory; and where
something was kept it does not begin at the beginning without being told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.memory.trajectories import uninterrupted


@dataclass(frozen=True)
class Restored:
    """A process has begun with a state: that of a step, or of the beginning (0)."""

    program: int
    process: int
    step: int
    digest: str
    epoch: int


@dataclass(frozen=True)
class Advanced:
    """A process has made a step, and begun to save."""

    program: int
    process: int
    step: int
    digest: str


@dataclass(frozen=True)
class Kept:
    """A process was told that all of a step is kept in memory, and another one in the directory."""

    program: int
    process: int
    in_memory: int
    in_directory: int


@dataclass(frozen=True)
class HostLost:
    """A host was lost with its memory, or some of that was damaged."""

    host: int


@dataclass(frozen=True)
class NothingLeft:
    """A process was told that what was committed is lost, and that there is nothing to begin with."""

    program: int
    process: int


Event = Restored | Advanced | Kept | HostLost | NothingLeft


class Broken(AssertionError):
    """A law was broken."""


def audit(seed: int, process_count: int, copies: int, history: Iterable[Event]) -> None:
    """Checks a history.

    Args:
        seed: Of the trajectory.
        process_count: Of each program.
        copies: Of each shard, on as many hosts.
        history: The events as they were seen.

    Raises:
        Broken: A law does not hold.
    """
    laws = _Laws(seed, process_count, copies)
    for event in history:
        laws.take(event)


class _Laws:
    def __init__(self, seed: int, process_count: int, copies: int) -> None:
        self._seed = seed
        self._process_count = process_count
        self._copies = copies
        self._program = -1
        self._epoch = 0
        self._restored: dict[int, Restored] = {}
        self._at: dict[int, int] = {}
        # What is kept, and the hosts that were lost since it was said to be.
        self._in_memory = 0
        self._in_directory = 0
        self._lost: set[int] = set()
        self._ever_kept = False
        self._told = -1  # the last program that was told that nothing is left

    def take(self, event: Event) -> None:
        match event:
            case HostLost(host):
                self._lost.add(host)
            case NothingLeft(program):
                is_lost = len(self._lost) >= self._copies or not self._in_memory
                self._check(event, is_lost, f"step {self._in_memory} was kept, and is said to be lost")
                self._check(event, not self._in_directory, "though the directory has something")
                self._told = program
            case Restored():
                self._restore(event)
            case Advanced(_, process, step, digest):
                self._check(event, step == self._at[process] + 1, "a step was left out or made twice")
                self._check_digest(event, process, step, digest)
                self._at[process] = step
            case Kept(_, process, in_memory, in_directory):
                reached = self._at[process]
                self._check(event, max(in_memory, in_directory) <= reached, "is kept before it was made")
                self._ever_kept |= bool(in_memory or in_directory)
                if in_memory > self._in_memory:
                    self._in_memory = in_memory
                    self._lost.clear()
                self._in_directory = max(self._in_directory, in_directory)

    def _restore(self, event: Restored) -> None:
        if event.program != self._program:
            self._check(event, event.program > self._program, "comes from a program that is over")
            floor = self._in_directory
            if len(self._lost) < self._copies:
                self._check(event, event.epoch > self._epoch, "is not in a later epoch")
                floor = max(floor, self._in_memory)
            else:
                self._in_memory = 0
                self._lost.clear()
            self._program, self._epoch = event.program, event.epoch
            self._restored.clear()
            self._at.clear()
            self._check(event, event.step >= floor, f"step {floor} was kept and is lost")
            is_silent = event.step == 0 and self._ever_kept and self._told != event.program
            self._check(event, not is_silent, "begins at the beginning, and was not told that all is lost")
        for other in self._restored.values():
            self._check(
                event, other.step == event.step, f"is another step than that of process {other.process}"
            )
        self._check(event, event.process not in self._restored, "restores twice")
        self._check(event, 0 <= event.process < self._process_count, "is no process")
        self._check_digest(event, event.process, event.step, event.digest)
        self._restored[event.process] = event
        self._at[event.process] = event.step

    def _check_digest(self, event: Event, process: int, step: int, digest: str) -> None:
        expected = uninterrupted(self._seed, process).digest_at(step)
        self._check(event, digest == expected, "is not the state of the uninterrupted run")

    def _check(self, event: Event, holds: bool, message: str) -> None:
        if not holds:
            raise Broken(f"{event}: {message}")
