"""For how long a process has used next to no processor time: evidence that devices on CPUs do nothing.

A process that gets none of a busy machine is not idle: one of its threads has run, or waited for a processor,
nearly all the time, as far as the kernel tells. Nor is one that was stopped, as by SIGSTOP or with its whole
machine: of a time in which nobody has asked, only a little counts. Nothing is known of accelerators, which
compute without their process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Ray and JAX keep threads that wake up now and then; a thread that computes uses a whole processor.
_IDLE_SHARE = 0.1
# That much of the time has a thread run, or waited for a processor, that has something to compute.
_WANTING_SHARE = 0.5
_LEAST_SAMPLE_S = 0.05
# Watchdogs ask each second, or more often.
_MOST_SAMPLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has used of processors until now.

    Attributes:
        process_s: Seconds of all its threads.
        wanted_s: For each thread the seconds in which it has run or waited for a processor.
    """

    process_s: float
    wanted_s: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Used:
        """What this process has used."""
        wanted: dict[int, float] = {}
        for path in Path("/proc/self/task").glob("[0-9]*/schedstat"):
            try:
                ran_ns, waited_ns, _ = map(int, path.read_text().split())
            except (OSError, ValueError):
                continue  # the thread has ended, or the kernel does not tell
            wanted[int(path.parent.name)] = (ran_ns + waited_ns) / 1e9
        return cls(time.process_time(), wanted)


class Idleness:
    """Watches this process; ask it now and then.

    Args:
        used: What the process has used until now.
        clock: Seconds that grow.
    """

    def __init__(
        self, used: Callable[[], Used] = Used.here, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._used = used
        self._clock = clock
        self._sampled_s = self._since_s = clock()
        self._last = used()

    def idle_s(self) -> float:
        """For how long it has been idle, in seconds."""
        now_s = self._clock()
        passed_s = now_s - self._sampled_s
        if passed_s >= _LEAST_SAMPLE_S:
            used = self._used()
            before = self._last.wanted_s
            waiting = (each - before.get(thread, 0.0) for thread, each in used.wanted_s.items())
            is_used = used.process_s - self._last.process_s > _IDLE_SHARE * passed_s
            if is_used or max(waiting, default=0.0) > _WANTING_SHARE * passed_s:
                self._since_s = now_s
            else:
                self._since_s += max(0.0, passed_s - _MOST_SAMPLE_S)
            self._sampled_s, self._last = now_s, used
        return now_s - self._since_s
