"""Runs that span islands never wait for each other in a circle, and the sequencer's policies hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import InvalidInput
from waystation.runtime.scheduling import (
    ClientNumbers,
    IslandScheduler,
    ProportionalShare,
    RunKey,
    Sequencer,
    SpanningSubmission,
    Submission,
)

ISLANDS = "abcd"


@dataclass
class World:
    """Islands whose hosts run strictly in order; a run ends when all its islands have come to it."""

    chance: random.Random
    depth: int
    islands: dict[str, IslandScheduler] = field(init=False)
    sequencer: Sequencer = field(init=False)
    flying: list[object] = field(default_factory=list)
    lines: dict[str, list[RunKey]] = field(default_factory=lambda: {name: [] for name in ISLANDS})
    places: dict[RunKey, tuple[str, ...]] = field(default_factory=dict)
    ended: list[RunKey] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.islands = {
            name: IslandScheduler(
                name, ProportionalShare({"x": 3}), seconds_ahead=self.depth, runs_per_client=self.depth
            )
            for name in ISLANDS
        }
        self.sequencer = Sequencer(ProportionalShare({"y": 2}), runs_ahead=self.depth)

    def submit(self, programs: list[tuple[str, frozenset[str], int]]) -> None:
        """Sends programs of clients off, each to the scheduler that is to have it."""
        numbers: dict[str, ClientNumbers] = {}
        for run, (client, islands, priority) in enumerate(programs):
            own = numbers.setdefault(client, ClientNumbers())
            key = RunKey(client, run)
            self.places[key] = tuple(sorted(islands))
            if len(islands) == 1:
                (island,) = islands
                self.flying.append((island, Submission(key, "p", own.position(island), 1.0, priority)))
            else:
                order, positions = own.spanning(islands)
                self.flying.append(SpanningSubmission(key, "p", order, positions, 1.0, priority))

    def step(self) -> bool:
        """Delivers a message, or ends a run that all its islands have come to; False if there is neither."""
        able = [
            key
            for key, islands in self.places.items()
            if all(self.lines[name] and self.lines[name][0] == key for name in islands)
        ]
        if not self.flying and not able:
            return False
        choice = self.chance.randrange(len(self.flying) + len(able))
        if choice < len(self.flying):
            self.deliver(self.flying.pop(choice))
        else:
            self.end(able[choice - len(self.flying)])
        return True

    def deliver(self, message: object) -> None:
        if isinstance(message, SpanningSubmission):
            self.flying += self.sequencer.submit(message)
        else:
            island, submission = message
            for dispatch in self.islands[island].submit(submission):
                self.lines[island].append(dispatch.key)

    def end(self, key: RunKey) -> None:
        self.ended.append(key)
        for island in self.places[key]:
            assert self.lines[island].pop(0) == key
            for dispatch in self.islands[island].complete(key, 1.0):
                self.lines[island].append(dispatch.key)
        self.flying += self.sequencer.complete(key, 1.0)


PROGRAMS = st.lists(
    st.tuples(
        st.sampled_from("xyz"),
        st.frozensets(st.sampled_from(ISLANDS), min_size=1),
        st.sampled_from([0, 0, 0, 1]),
    ),
    max_size=40,
)


@given(programs=PROGRAMS, depth=st.integers(1, 5), seed=st.integers(0, 1 << 32))
def test_every_program_comes_to_its_end(
    programs: list[tuple[str, frozenset[str], int]], depth: int, seed: int
) -> None:
    world = World(random.Random(seed), depth)
    world.submit(programs)
    while world.step():
        pass
    assert sorted(world.ended) == sorted(world.places)
    for client in "xyz":
        for island in ISLANDS:
            own = [key.run for key in world.ended if key.client == client and island in world.places[key]]
            assert own == sorted(own)


@given(programs=PROGRAMS, depth=st.integers(1, 5), seed=st.integers(0, 1 << 32))
def test_the_death_of_a_client_stops_nobody_else(
    programs: list[tuple[str, frozenset[str], int]], depth: int, seed: int
) -> None:
    """All that the dead client had not sent is lost; what others have not been told of it still comes."""
    world = World(random.Random(seed), depth)
    world.submit(programs)
    for _ in range(world.chance.randrange(len(programs) + 1)):
        world.step()
    world.flying = [
        message
        for message in world.flying
        if (message.key if isinstance(message, SpanningSubmission) else message[1].key).client != "x"
        or (not isinstance(message, SpanningSubmission) and message[1].ticket is not None)
    ]
    _, routed = world.sequencer.drop_client("x")
    world.flying += routed
    for name, island in world.islands.items():
        world.lines[name] += [dispatch.key for dispatch in island.drop_client("x")[1]]
    while world.step():
        pass
    assert sorted(key for key in world.ended if key.client != "x") == sorted(
        key for key in world.places if key.client != "x"
    )
    assert all(not line for line in world.lines.values())


def test_tickets_of_an_island_have_no_gaps() -> None:
    sequencer = Sequencer(runs_ahead=2)
    numbers = ClientNumbers()
    routed = []
    for run, islands in enumerate(["ab", "bc", "ac"]):
        order, positions = numbers.spanning(islands)
        routed += sequencer.submit(SpanningSubmission(RunKey("x", run), "p", order, positions))
    routed += sequencer.complete(RunKey("x", 0))
    assert [(island, each.key.run, each.ticket) for island, each in routed] == [
        ("a", 0, 0),
        ("b", 0, 0),
        ("b", 1, 1),
        ("c", 1, 0),
        ("a", 2, 1),
        ("c", 2, 1),
    ]
    with pytest.raises(InvalidInput, match="at least one run"):
        Sequencer(runs_ahead=0)
