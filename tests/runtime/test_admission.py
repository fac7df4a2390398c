"""Memory of devices: runs get in one after the other, nothing overflows, and nothing waits for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.runtime.objects import (
    Admit,
    Decision,
    Handle,
    HostMemory,
    Refuse,
    Reservation,
    Restore,
    Spill,
    Stalled,
)
from waystation.runtime.scheduling import RunKey


def handle(number: int) -> Handle:
    return Handle(number)


def need(run: int, peak: int, *operands: int, consumed: tuple[int, ...] = (), **outputs: int) -> Reservation:
    """A run on device 0; outputs are named `o<handle>`."""
    return Reservation(
        RunKey("x", run),
        {0: peak},
        tuple(map(handle, operands)),
        tuple(map(handle, consumed)),
        {handle(int(name[1:])): {0: held} for name, held in outputs.items()},
    )


def key(run: int) -> RunKey:
    return RunKey("x", run)


def test_two_programs_of_sixty_percent_run_one_after_the_other() -> None:
    memory = HostMemory("h", {0: 100})
    assert memory.request(need(0, 60)) == [Admit(key(0))]
    assert memory.request(need(1, 60)) == []
    assert memory.request(need(2, 10)) == []  # would fit, but runs keep their order
    assert memory.finish(key(0)) == [Admit(key(1)), Admit(key(2))]
    assert memory.used_bytes == {0: 70}


def test_a_run_that_can_never_fit_is_refused_at_once() -> None:
    memory = HostMemory("h", {0: 100, 1: 10})
    memory.put(handle(5), {0: 30})
    (refused,) = memory.request(need(0, 80, 5))
    assert isinstance(refused, Refuse)
    assert "needs 110 bytes on device h:0 of 100, and lacks 10; objects 5 hold the most" in str(refused.error)
    assert memory.request(need(1, 70, 5)) == [Admit(key(1))]


def test_the_least_recently_used_are_spilled_and_come_back() -> None:
    memory = HostMemory("h", {0: 100}, spill_budget=100)
    memory.request(need(0, 80, o1=40, o2=40))
    memory.finish(key(0))
    assert memory.request(need(1, 10, 1)) == [Admit(key(1))]
    memory.finish(key(1))
    assert memory.request(need(2, 50)) == [Spill(handle(2)), Admit(key(2))]
    assert memory.spilled_bytes == 40
    assert memory.request(need(3, 20, 2)) == []
    assert memory.finish(key(2)) == [Restore(handle(2)), Admit(key(3))]
    assert (memory.used_bytes, memory.spilled_bytes) == ({0: 100}, 0)


def test_what_a_run_uses_is_not_spilled() -> None:
    memory = HostMemory("h", {0: 100}, spill_budget=1000)
    memory.put(handle(1), {0: 60})
    memory.request(need(0, 10, 1))
    assert memory.request(need(1, 50)) == []
    assert memory.finish(key(0)) == [Spill(handle(1)), Admit(key(1))]


def test_who_waits_for_clients_to_release_is_told_and_can_give_up() -> None:
    memory = HostMemory("h", {0: 100}, spill_budget=10)
    memory.put(handle(1), {0: 30})
    memory.put(handle(2), {0: 50})
    assert memory.request(need(0, 60)) == [Stalled(key(0), (handle(2), handle(1)))]
    assert memory.request(need(1, 10)) == []
    assert memory.free(handle(1)) == []
    refused, admitted = memory.give_up(key(0))
    assert isinstance(refused, Refuse)
    assert "lacks 10; objects 2 hold the most" in str(refused.error)
    assert admitted == Admit(key(1))
    assert memory.give_up(key(0)) == []


def test_what_can_never_fit_is_refused_at_once_wherever_it_is_in_line() -> None:
    memory = HostMemory("h", {0: 100})
    memory.put(handle(1), {0: 60})
    assert memory.request(need(0, 60)) == [Stalled(key(0), (handle(1),))]
    (refused,) = memory.request(need(1, 101))
    assert isinstance(refused, Refuse)
    assert "needs 101 bytes on device h:0 of 100" in str(refused.error)
    assert memory.free(handle(1)) == [Admit(key(0))]


def test_a_run_that_has_room_can_overtake_and_is_not_what_others_wait_for() -> None:
    memory = HostMemory("h", {0: 100})
    memory.put(handle(1), {0: 60})
    memory.request(need(0, 20))
    assert memory.request(need(1, 60)) == []  # what runs may make room
    assert memory.waits_for_clients(key(1))
    assert memory.request(need(2, 30)) == []
    assert not memory.can_be_admitted(key(2))
    assert memory.request(need(3, 10, o4=4)) == []
    assert memory.can_be_admitted(key(3))
    assert memory.overtake(key(3)) == [Admit(key(3))]
    assert memory.finish(key(0)) == [Stalled(key(1), (handle(1),))]  # while that goes on
    assert memory.free(handle(1)) == [Admit(key(1)), Admit(key(2))]
    assert memory.used_bytes == {0: 100}


def test_a_run_that_waits_for_another_does_not_wait_for_clients() -> None:
    memory = HostMemory("h", {0: 100}, spill_budget=30)
    memory.put(handle(1), {0: 30})
    memory.request(need(0, 20, 1))
    memory.request(need(1, 70))
    assert not memory.waits_for_clients(key(1))


def test_what_is_freed_while_it_is_used_ends_with_its_use() -> None:
    memory = HostMemory("h", {0: 100})
    memory.put(handle(1), {0: 60})
    memory.request(need(0, 40, 1, o2=40))
    assert memory.request(need(1, 30, 2)) == []
    for number in (1, 2):
        assert memory.free(handle(number)) == []
    assert memory.finish(key(0)) == [Admit(key(1))]
    memory.finish(key(1))
    assert memory.used_bytes == {0: 0}


@pytest.mark.parametrize("failed", [False, True])
def test_a_donated_operand_makes_room_for_the_result(failed: bool) -> None:
    memory = HostMemory("h", {0: 100})
    memory.put(handle(1), {0: 100})
    assert memory.request(need(0, 0, 1, consumed=(1,), o2=100)) == [Admit(key(0))]
    memory.finish(key(0), failed=failed)
    assert memory.used_bytes == {0: 0 if failed else 100}


@dataclass
class Gangs:
    """Hosts that admit runs in one order; a run ends when all its hosts have admitted it."""

    chance: random.Random
    hosts: list[HostMemory]
    runs: list[tuple[set[int], dict[int, Reservation]]]
    places: list[int] = field(init=False)
    admitted: dict[RunKey, set[int]] = field(default_factory=dict)
    refused: set[RunKey] = field(default_factory=set)
    ended: set[RunKey] = field(default_factory=set)
    stalled: set[tuple[int, RunKey]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = [0] * len(self.hosts)

    def note(self, host: int, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Admit):
                self.admitted.setdefault(decision.run, set()).add(host)
            elif isinstance(decision, Refuse):
                self.refused.add(decision.run)
            elif isinstance(decision, Stalled):
                self.stalled.add((host, decision.run))

    def moves(self) -> list[tuple[str, int, RunKey]]:
        """What could happen next: a host sees a run, a run ends, a refused one is given up."""
        found = []
        for host, place in enumerate(self.places):
            if place < len(self.runs):
                found.append(("see", host, key(place)))
        for run, (members, _) in enumerate(self.runs):
            if key(run) not in self.ended and self.admitted.get(key(run), set()) == members:
                found.append(("end", 0, key(run)))
            elif key(run) in self.refused - self.ended and all(self.places[host] > run for host in members):
                found.append(("cancel", 0, key(run)))
        return found

    def step(self, kind: str, host: int, run: RunKey) -> None:
        members, reservations = self.runs[run.run]
        if kind == "see":
            self.places[host] += 1
            if host in members:
                self.note(host, self.hosts[host].request(reservations[host]))
            return
        self.ended.add(run)
        for member in sorted(members):
            if member in self.admitted.get(run, set()):
                self.note(member, self.hosts[member].finish(run, failed=kind == "cancel"))
            else:
                self.note(member, self.hosts[member].give_up(run))


@st.composite
def worlds(draw: st.DrawFn) -> Gangs:
    count = draw(st.integers(1, 3))
    budgets = [draw(st.integers(20, 60)) for _ in range(count)]
    hosts = [
        HostMemory(f"h{at}", {0: budget, 1: 40}, draw(st.integers(0, 40)))
        for at, budget in enumerate(budgets)
    ]
    runs = []
    made: dict[int, set[int]] = {}
    for run in range(draw(st.integers(1, 12))):
        members = draw(st.sets(st.integers(0, count - 1), min_size=1))
        usable = [number for number, where in made.items() if members <= where]
        operands = draw(st.lists(st.sampled_from(usable), unique=True, max_size=2)) if usable else []
        consumed = tuple(number for number in operands if draw(st.booleans()))
        for number in consumed:
            del made[number]
        reservations = {}
        peak = draw(st.integers(0, 45))
        kept = draw(st.integers(0, peak))
        for host in members:
            device = draw(st.sampled_from([0, 1]))
            outputs = {handle(run): {device: kept}}
            reservations[host] = Reservation(
                key(run), {device: peak}, tuple(map(handle, operands)), tuple(map(handle, consumed)), outputs
            )
        made[run] = members
        runs.append((members, reservations))
    return Gangs(random.Random(draw(st.integers(0, 1 << 32))), hosts, runs)


@given(worlds())
def test_every_run_is_admitted_and_ends_or_is_refused(world: Gangs) -> None:
    while len(world.ended) < len(world.runs):
        moves = world.moves()
        if not moves:
            # All that is left waits for objects that clients hold; whoever drives this gives up at last.
            first = min(run for _, run in world.stalled if run not in world.ended)
            assert first.run == min(run for run in range(len(world.runs)) if key(run) not in world.ended)
            world.refused.add(first)
            continue
        world.step(*world.chance.choice(moves))
        for host in world.hosts:
            assert all(0 <= used <= host.device_budgets[device] for device, used in host.used_bytes.items())
            assert 0 <= host.spilled_bytes <= host.spill_budget
    for host in world.hosts:
        for number in range(len(world.runs)):
            host.free(handle(number))
        assert set(host.used_bytes.values()) == {0}
        assert host.spilled_bytes == 0
