"""The order of an island: policies, priorities, bounds, epochs; and what hosts make of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import Conflict, InvalidInput
from waystation.runtime.scheduling import (
    ClientNumbers,
    Dispatch,
    IslandScheduler,
    ProportionalShare,
    ReorderBuffer,
    RunKey,
    Submission,
)
from waystation.runtime.scheduling.queues import ClientQueues


def keys(dispatches: list[Dispatch]) -> list[tuple[str, int]]:
    return [dispatch.key[:2] for dispatch in dispatches]


def run(client: str, position: int, **given) -> Submission:
    return Submission(RunKey(client, position), "program", position, given.pop("cost_seconds", 1.0), **given)


def drain(scheduler: IslandScheduler) -> list[tuple[str, int]]:
    """Completes what is in flight, the oldest first, until nothing is."""
    found = []
    while scheduler.in_flight:
        key = scheduler.in_flight[0]
        found.append(key[:2])
        scheduler.complete(key)
    return found


def test_of_clients_that_are_gone_no_queue_is_left() -> None:
    queues: ClientQueues[str] = ClientQueues()
    queues.add("x", 0, "first")
    queues.add("x", 2, "after one that never comes")
    assert queues.drop("x", keep=lambda each: each == "first") == ["after one that never comes"]
    assert queues.pop("x") == "first"
    assert not queues._queues
    queues.add("x", 5, "had its turn before")
    assert queues.pop("x") == "had its turn before"
    assert not queues._queues


def test_runs_are_numbered_in_the_order_of_arrival() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=10)
    dispatches = [
        *scheduler.submit(run("x", 0)),
        *scheduler.submit(run("y", 0)),
        *scheduler.submit(run("x", 1)),
    ]
    assert keys(dispatches) == [("x", 0), ("y", 0), ("x", 1)]
    assert [(each.island, each.epoch, each.sequence) for each in dispatches] == [
        ("a", 1, at) for at in range(3)
    ]


def test_a_client_keeps_its_order_however_messages_travel() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=10)
    assert scheduler.submit(run("x", 2)) == []
    assert scheduler.submit(run("x", 1)) == []
    assert keys(scheduler.submit(run("x", 0))) == [("x", 0), ("x", 1), ("x", 2)]
    with pytest.raises(Conflict, match="two runs at position 1"):
        scheduler.submit(run("x", 1))


def test_only_so_much_is_in_flight() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=2.5, runs_per_client=2)
    dispatches = [each for at in range(4) for each in scheduler.submit(run("x", at))]
    dispatches += [each for at in range(4) for each in scheduler.submit(run("y", at))]
    assert keys(dispatches) == [("x", 0), ("x", 1), ("y", 0)]
    assert scheduler.waiting_count == 5
    assert keys(scheduler.complete(RunKey("x", 0))) == [("x", 2)]
    assert scheduler.complete(RunKey("x", 0)) == []
    assert len(drain(scheduler)) == 7
    for wrong in ({"seconds_ahead": 0}, {"least_in_flight": 0}, {"runs_per_client": 0}):
        with pytest.raises(InvalidInput, match="at least one run"):
            IslandScheduler("a", **wrong)


def test_while_a_long_run_is_in_flight_the_next_one_is_too() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=0.005, least_in_flight=2)
    dispatches = [each for at in range(4) for each in scheduler.submit(run("x", at))]
    assert keys(dispatches) == [("x", 0), ("x", 1)]
    assert keys(scheduler.complete(RunKey("x", 0))) == [("x", 2)]


def test_higher_priorities_go_first() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=0.5)
    scheduler.submit(run("x", 0))
    scheduler.submit(run("x", 1))
    scheduler.submit(run("y", 0, priority=1))
    scheduler.submit(run("y", 1))
    assert drain(scheduler) == [("x", 0), ("y", 0), ("x", 1), ("y", 1)]


def test_who_holds_the_next_ticket_is_lent_the_priority_of_who_waits_for_it() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=0.5)
    scheduler.submit(run("other", 0))
    scheduler.submit(run("other", 1))
    scheduler.submit(run("low", 0, ticket=0))
    scheduler.submit(run("high", 0, priority=5, ticket=1))
    assert drain(scheduler) == [("other", 0), ("low", 0), ("high", 0), ("other", 1)]


def test_tickets_are_waited_for() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=10)
    assert scheduler.submit(run("x", 0, ticket=1)) == []
    assert keys(scheduler.submit(run("y", 0))) == [("y", 0)]
    assert keys(scheduler.submit(run("y", 1, ticket=0))) == [("y", 1), ("x", 0)]


def test_a_rebuilt_island_begins_a_new_epoch() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=1.5)
    for at in range(4):
        scheduler.submit(run("x", at))
    lost, dispatches = scheduler.restart()
    assert [each.key.run for each in lost] == [0, 1]
    assert [(each.epoch, each.sequence, each.key.run) for each in dispatches] == [(2, 0, 2), (2, 1, 3)]
    assert scheduler.complete(RunKey("x", 0), 1.0) == []


def test_a_dead_client_gives_way_but_its_tickets_keep_their_turn() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=0.5)
    scheduler.submit(run("x", 0))
    scheduler.submit(run("y", 0))
    scheduler.submit(run("y", 2, ticket=1))
    scheduler.submit(run("y", 3))
    scheduler.submit(run("z", 0, ticket=2))
    dropped, _ = scheduler.drop_client("y")
    assert sorted(each.key.run for each in dropped) == [0, 3]
    scheduler.submit(run("y", 1, ticket=0))
    assert drain(scheduler) == [("x", 0), ("y", 1), ("y", 2), ("z", 0)]


def test_costs_are_learned_from_what_runs_have_taken() -> None:
    scheduler = IslandScheduler("a", seconds_ahead=1e-3)
    scheduler.submit(Submission(RunKey("x", 0), "long", 0))
    scheduler.complete(RunKey("x", 0), 1e-4)
    ahead = [
        each for at in range(1, 20) for each in scheduler.submit(Submission(RunKey("x", at), "long", at))
    ]
    assert len(ahead) == 10


class Island:
    """An island that runs one thing after the other, and clients that keep a few runs submitted."""

    def __init__(self, policy: ProportionalShare, costs: dict[str, float], depth: int, guess: float | None):
        self.scheduler = IslandScheduler("a", policy, seconds_ahead=2.5 * max(costs.values()))
        self.costs = costs
        self.guess = guess
        self.used = dict.fromkeys(costs, 0.0)
        self.numbers = {client: ClientNumbers() for client in costs}
        self.line: list[Dispatch] = []
        for client in costs:
            for _ in range(depth):
                self.submit(client)

    def submit(self, client: str) -> None:
        position = self.numbers[client].position("a")
        submission = Submission(RunKey(client, position), client, position, self.guess)
        self.line += self.scheduler.submit(submission)

    def run(self, seconds: float) -> None:
        while sum(self.used.values()) < seconds:
            done = self.line.pop(0)
            client = done.key.client
            self.used[client] += self.costs[client]
            self.line += self.scheduler.complete(done.key, self.costs[client])
            self.submit(client)


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
@pytest.mark.parametrize("milliseconds", [(0.33,) * 4, (5.0, 0.33, 2.0, 1.0)])
@pytest.mark.parametrize("guess", [None, 1e-3])
@pytest.mark.share(8)
def test_shares_are_within_five_percent_of_what_is_asked(
    weights: tuple[int, ...], milliseconds: tuple[float, ...], guess: float | None
) -> None:
    """Every client keeps 32 runs submitted; what they cost is guessed wrongly at first, or always."""
    clients = [f"client{at}" for at in range(4)]
    policy = ProportionalShare(dict(zip(clients, weights, strict=True)))
    island = Island(policy, dict(zip(clients, (at / 1e3 for at in milliseconds), strict=True)), 32, guess)
    island.run(6.0)
    for client, weight in zip(clients, weights, strict=True):
        share = island.used[client] / sum(island.used.values())
        assert abs(share / (weight / sum(weights)) - 1) < 0.05, island.used


def test_who_has_nothing_to_run_leaves_its_share_to_the_others_and_saves_up_nothing() -> None:
    policy = ProportionalShare({"often": 1, "seldom": 3})
    island = Island(policy, {"often": 1e-3}, 8, None)
    island.run(1.0)
    island.costs["seldom"], island.used["seldom"] = 1e-3, 0.0
    island.numbers["seldom"] = ClientNumbers()
    for _ in range(8):
        island.submit("seldom")
    before = island.used["often"]
    island.run(1.4)
    assert island.used["seldom"] == pytest.approx(0.3, rel=0.05)
    assert island.used["often"] - before == pytest.approx(0.1, rel=0.05)


def test_weights_are_at_least_one() -> None:
    with pytest.raises(InvalidInput, match="cannot have weight 0"):
        ProportionalShare({"x": 0})


class Deliveries:
    """Submissions, dispatches and completions of one island, all of which travel with random delays."""

    def __init__(self, hosts: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.scheduler = IslandScheduler(
            "i", ProportionalShare({"a": 2}), seconds_ahead=2.5, runs_per_client=3
        )
        self.buffers = [ReorderBuffer[Dispatch]() for _ in range(hosts)]
        self.seen: list[list[RunKey]] = [[] for _ in range(hosts)]
        self.ended: Counter[tuple[int, RunKey]] = Counter()
        self.lost: set[RunKey] = set()
        self.flying: list[object] = []

    def deliver(self) -> None:
        """Delivers any of the messages."""
        message = self.flying.pop(self.chance.randrange(len(self.flying)))
        if isinstance(message, Submission):
            self.dispatch(self.scheduler.submit(message))
        elif isinstance(message, RunKey):
            self.dispatch(self.scheduler.complete(message))
        else:
            self.run(*message)

    def dispatch(self, dispatches: list[Dispatch]) -> None:
        self.flying += [(host, each) for each in dispatches for host in range(len(self.buffers))]

    def run(self, host: int, dispatch: Dispatch) -> None:
        for ready in self.buffers[host].add(dispatch.epoch, dispatch.sequence, dispatch):
            self.seen[host].append(ready.key)
            self.ended[ready.epoch, ready.key] += 1
            if (
                self.ended[ready.epoch, ready.key] == len(self.buffers)
                and ready.epoch == self.scheduler.epoch
            ):
                self.flying.append(ready.key)

    def rebuild(self) -> None:
        """The gang of hosts is killed and started anew."""
        lost, dispatches = self.scheduler.restart()
        self.lost.update(each.key for each in lost)
        for buffer in self.buffers:
            assert buffer.begin(self.scheduler.epoch) == []
        self.dispatch(dispatches)


@given(
    clients=st.lists(st.sampled_from("abc"), min_size=1, max_size=25),
    hosts=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
)
def test_all_hosts_see_one_order_whatever_the_delivery(clients: list[str], hosts: int, seed: int) -> None:
    world = Deliveries(hosts, seed)
    numbers = {client: ClientNumbers() for client in "abc"}
    world.flying += [run(client, numbers[client].position("i")) for client in clients]
    for _ in range(world.chance.randrange(len(clients) * 3)):
        world.deliver()
    world.rebuild()
    while world.flying:
        world.deliver()
    finished = [key for key in world.seen[0] if key not in world.lost]
    assert all([key for key in own if key not in world.lost] == finished for own in world.seen)
    assert len(finished) + len(world.lost) == len(clients)
    assert all(buffer.missing is None for buffer in world.buffers)
    for client in "abc":
        own = [key.run for key in finished if key.client == client]
        assert own == sorted(own)


def test_a_reorder_buffer_keeps_epochs_apart() -> None:
    buffer = ReorderBuffer[str](2)
    assert buffer.add(1, 0, "old") == []
    assert buffer.add(3, 0, "new") == []
    assert buffer.add(2, 1, "b") == []
    assert buffer.missing == 0
    assert buffer.add(2, 0, "a") == ["a", "b"]
    assert buffer.add(2, 0, "again") == []
    assert buffer.missing is None
    assert buffer.begin(2) == []
    assert buffer.begin(3) == ["new"]
    assert buffer.add(3, 1, "newer") == ["newer"]
