"""From runs to figures: series of repetitions, their medians and worst runs, and ratios between them.

A ratio is how many times faster the first is than the second: the median of one over the median of the
other. Its worst case pairs the runs of the same round, which saw the same minute of the machine, and
takes the least favourable pair.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.systems import SYSTEMS

Run = dict[str, Any]
Key = tuple[str, str, str, str]  # state, system, operation, way
LOADS = ("load", "stream")
"""What the names of operations begin with after which the state is there."""
MAIN_METRICS = {
    "save": "durable",
    "save-async": "blocking",
    "load-cold": "resident",
    "load-warm": "resident",
    "stream-cold": "resident",
    "stream-warm": "resident",
    "copy": "copied",
}
"""The metric by which the systems are compared in each operation."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one way of doing something, over the repetitions."""

    system: str
    way: str
    values: dict[int, float]

    @property
    def median(self) -> float:
        return statistics.median(self.values.values())

    @property
    def worst(self) -> float:
        return max(self.values.values())

    def percentile(self, percent: int) -> float:
        """By linear interpolation between runs."""
        ordered = sorted(self.values.values())
        position = (len(ordered) - 1) * percent / 100
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one series is than another."""

    median: float
    worst: float

    @classmethod
    def of(cls, ours: Series, theirs: Series) -> Ratio:
        rounds = ours.values.keys() & theirs.values.keys()
        median = theirs.median / ours.median
        worst = min((theirs.values[index] / ours.values[index] for index in rounds), default=median)
        return cls(median, worst)


class Results:
    """The runs of a session, by what they measured."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.runs: dict[Key, list[Run]] = defaultdict(list)
        for run in document["runs"]:
            self.runs[run["state"], run["system"], run["operation"], run["way"]].append(run)

    def states(self) -> list[str]:
        return list(dict.fromkeys(state for state, *_ in self.runs))

    def series(self, state: str, system: str, operation: str, way: str, metric: str) -> Series | None:
        """The successful runs of one way, or None if there are none."""
        values = {}
        for run in self.runs.get((state, system, operation, way), []):
            value = value_of(run, metric)
            if value is not None:
                values[run["repetition"]] = value
        return Series(system, way, values) if values else None

    def best(
        self,
        state: str,
        system: str,
        operation: str,
        metric: str | None = None,
        ways: Iterable[str] | None = None,
    ) -> Series | None:
        """The way of a system with the lowest median; `ways` narrows the choice."""
        chosen = set(ways) if ways is not None else None
        found = [
            series
            for key in self.runs
            if key[:3] == (state, system, operation) and (chosen is None or key[3] in chosen)
            if (series := self.series(*key, metric or MAIN_METRICS[operation]))
        ]
        return min(found, key=lambda series: series.median, default=None)

    def best_alike(
        self, state: str, system: str, operation: str, other: Series, metric: str | None = None
    ) -> Series | None:
        """The best way of a system that ends as `other` does: with mapped arrays, or bytes that it owns."""
        ways = None
        if operation.startswith(LOADS):
            mapped = is_mapped(other.system, other.way)
            every = {*SYSTEMS[system].load_ways, *SYSTEMS[system].stream_ways}
            ways = [way for way in every if is_mapped(system, way) == mapped]
        return self.best(state, system, operation, metric, ways)

    def largest(self, metric: str, choose: Callable[[Key], bool]) -> float | None:
        """The largest value of a metric over all runs that are chosen."""
        values = [
            value
            for key, runs in self.runs.items()
            if choose(key)
            for run in runs
            if (value := value_of(run, metric)) is not None
        ]
        return max(values, default=None)

    def failures(self) -> dict[tuple[str, str, str], list[Run]]:
        """Runs without figures, by system, status and reason."""
        found: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
        for runs in self.runs.values():
            for run in runs:
                if run["status"] != "ok":
                    found[run["system"], run["status"], run["reason"].splitlines()[0]].append(run)
        return found


def value_of(run: Run, metric: str) -> float | None:
    """One figure of a run: a time, a count, or one made of several."""
    if run["status"] != "ok":
        return None
    seconds: dict[str, float] = run["seconds"]
    if metric == "resident":
        metric = "touched" if is_mapped(run["system"], run["way"]) else "loaded"
    if metric == "memory_above":
        return memory_above(run)
    if metric == "background":
        return seconds["durable"] - seconds["blocking"]
    count: float | None = run.get(metric)
    return seconds.get(metric, count)


def is_mapped(system: str, way: str) -> bool:
    return system in SYSTEMS and way in SYSTEMS[system].mapped_ways


def memory_above(run: Run) -> float | None:
    """The peak of resident memory above the state: a load must hold the state, a save found it there."""
    growth: float | None = run.get("peak_growth_bytes")
    if growth is None or run["system"] == "limit":
        return None
    state: int = run["state_bytes"] if run["operation"].startswith(LOADS) else 0
    return max(0.0, growth - state)
