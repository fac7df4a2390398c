"""Which measurements there are, and in what order: interleaved, and never much on the disk at once.

One round measures everything once; within it the systems take turns, beginning with another one each
round, so that a slow minute of the machine falls on all of them alike. What one system has written is
loaded by it and by those that cannot write, and then removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.systems import SYSTEMS
from benchmarks.systems.limit import Limit

COSTS_PER_ARRAY = ("small", "small-20000", "small-100000", "tiny")
"""States in which the number of arrays counts: one raw file of as many bytes is no limit for them."""
DEFAULT_STATES = ("llama", "small", "one", "tiny")


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of measurement; repeated, its runs can be compared."""

    state: str
    system: str
    operation: str
    way: str

    @property
    def is_load(self) -> bool:
        return self.operation.startswith(("load", "stream"))

    def __str__(self) -> str:
        way = "" if self.way == "default" else f" ({self.way})"
        return f"{self.state}: {self.operation} {self.system}{way}"


@dataclass(frozen=True, slots=True)
class Selection:
    """What was asked for.

    Attributes:
        states, systems, operations: By their names.
        limit_ways: The ways of the limit that are tried; None for all.
        limit_operations: The operations of the limit, where it is to be measured in others than the systems.
        systems_of, operations_of: Of states that are for some systems or operations alone, these.
        publishers: By state, the system that writes what all others load, instead of each its own.
        maps: Whether loads are measured too after which files are only mapped.
    """

    states: Sequence[str]
    systems: Sequence[str]
    operations: Sequence[str]
    limit_ways: frozenset[str] | None = None
    limit_operations: Sequence[str] | None = None
    systems_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    operations_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    publishers: Mapping[str, str] = field(default_factory=dict)
    maps: bool = True

    def systems_for(self, state: str) -> Sequence[str]:
        """The systems that a state is measured with."""
        return self.systems_of.get(state, self.systems)

    def writer_of(self, state: str, system_name: str) -> str:
        """Who writes what a system loads of a state."""
        system = SYSTEMS[system_name]
        own = system.writer
        return own if issubclass(system, Limit) else self.publishers.get(state, own)


@dataclass(frozen=True, slots=True)
class Turn:
    """All measurements that use one system's checkpoint of one state, in order."""

    writer: str
    saves: tuple[Case, ...]
    loads: tuple[Case, ...]


def cases_of(selection: Selection, state: str, system_name: str) -> list[Case]:
    """Everything that is measured of one system on one state."""
    system = SYSTEMS[system_name]
    if issubclass(system, Limit) and state in COSTS_PER_ARRAY:
        return []
    operations = selection.operations_of.get(state, selection.operations)
    if issubclass(system, Limit) and selection.limit_operations is not None:
        operations = selection.limit_operations
    found = []
    for operation in operations:
        ways: tuple[str, ...] = ()
        if operation == "save":
            ways = system.save_ways
        elif operation == "save-async":
            ways = ("default",) if system.saves_async else ()
        elif operation.startswith("load"):
            ways = system.load_ways
        elif operation.startswith("stream"):
            ways = system.stream_ways
        elif operation == "copy" and issubclass(system, Limit):
            ways = system.copy_ways
        if issubclass(system, Limit) and selection.limit_ways is not None:
            ways = tuple(way for way in ways if way in selection.limit_ways)
        if not selection.maps:
            ways = tuple(way for way in ways if way not in system.mapped_ways)
        found += [Case(state, system_name, operation, way) for way in ways]
    return found


def turns(selection: Selection, state: str, repetition: int) -> Iterator[Turn]:
    """The turns of one round, beginning with another system each time, as each of them does."""
    readers_of: dict[str, list[str]] = {}
    for name in selection.systems_for(state):
        readers_of.setdefault(selection.writer_of(state, name), []).append(name)
    for writer in _rotated(list(readers_of), repetition):
        readers = _rotated(readers_of[writer], repetition)
        cases = [case for name in readers for case in cases_of(selection, state, name)]
        saves = tuple(case for case in cases if not case.is_load)
        loads = tuple(case for case in cases if case.is_load)
        if cases:
            # An asynchronous save first: the synchronous one leaves what the loads read.
            yield Turn(writer, tuple(sorted(saves, key=lambda case: case.operation == "save")), loads)


def _rotated(names: list[str], repetition: int) -> list[str]:
    shift = repetition % max(1, len(names))
    return names[shift:] + names[:shift]


def all_cases(selection: Selection) -> list[Case]:
    return [
        case
        for state in selection.states
        for turn in turns(selection, state, 0)
        for case in (*turn.saves, *turn.loads)
    ]
