"""Rounds: each measures everything once, beginning with another one each time, in one process.

Whatever is measured lives all the time, so all of them have the same processes beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.processes import Outcome

_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """Something that is measured.

    Attributes:
        subject: What it is measured on.
        system: Who does it.
        operation: What is done.
        run: Does so many computations, and says how long that took, in seconds.
        unit: How many it can do: multiples of this.
    """

    subject: str
    system: str
    operation: str
    run: Callable[[int], float]
    unit: int = 1

    def outcome(self, repetition: int, count: int, seconds: float, **facts: Any) -> Outcome:
        """A run of a round; its `seconds` are for each computation."""
        return {
            "subject": self.subject,
            "system": self.system,
            "operation": self.operation,
            "round": repetition,
            "status": "ok",
            "seconds": seconds / count,
            "computations": count,
            **facts,
        }


def in_rounds(timed: Sequence[Timed], rounds: int, budget_s: float) -> Iterator[Outcome]:
    """Measures everything in turns, each for about so many seconds."""
    counts = [_count(each, budget_s) for each in timed]
    pairs = list(zip(timed, counts, strict=True))
    for repetition in range(rounds):
        turn = repetition * max(1, len(pairs) // rounds) % len(pairs)
        for each, count in pairs[turn:] + pairs[:turn]:
            yield each.outcome(repetition, count, each.run(count))


def _count(timed: Timed, budget_s: float) -> int:
    """How many computations take about so long; when this is known, all is compiled and connected."""
    timed.run(timed.unit)
    count = timed.unit
    while (seconds := timed.run(count)) < budget_s / (2 * _GROWTH):
        count *= _GROWTH
    return timed.unit * max(1, math.ceil(budget_s / seconds * count / timed.unit))
