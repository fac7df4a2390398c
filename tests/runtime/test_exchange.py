"""Sparse exchanges: every consumer knows when it has all its messages, and never before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import Conflict, InvalidInput, Unavailable
from waystation.runtime.exchange import ExchangeTracker, Expected, Inbox, Outbox


@given(
    producers=st.integers(1, 6),
    consumers=st.integers(1, 6),
    data=st.data(),
    seed=st.integers(0, 1 << 32),
)
def test_a_consumer_is_complete_when_all_has_come_and_never_before(
    producers: int, consumers: int, data: st.DataObject, seed: int
) -> None:
    """Messages, declarations and totals come in any order, some of them twice."""
    chance = random.Random(seed)
    tracker = ExchangeTracker(producers, consumers)
    inboxes = [Inbox(consumer) for consumer in range(consumers)]
    sent: list[set[tuple[int, int]]] = [set() for _ in range(consumers)]
    flying: list[tuple[str, object]] = []
    for producer in range(producers):
        outbox = Outbox()
        for consumer in data.draw(st.lists(st.integers(0, consumers - 1), max_size=5)):
            message = producer, outbox.send(consumer)
            sent[consumer].add(message)
            flying.append(("message", (consumer, *message)))
        flying.append(("declare", (producer, outbox.counts())))
    flying += chance.sample(flying, chance.randrange(len(flying) + 1))
    received: list[set[tuple[int, int]]] = [set() for _ in range(consumers)]
    told = 0
    while flying:
        kind, content = flying.pop(chance.randrange(len(flying)))
        if kind == "message":
            consumer, producer, number = content
            assert inboxes[consumer].receive(producer, number) == (
                (producer, number) not in received[consumer]
            )
            received[consumer].add((producer, number))
        elif kind == "declare":
            totals = tracker.declare([content[0]], content[1])
            told += len(totals)
            flying += [("total", each) for each in totals]
        else:
            inboxes[content.consumer].expect(content)
        for consumer, inbox in enumerate(inboxes):
            assert not inbox.is_complete or received[consumer] == sent[consumer]
    assert told == consumers
    assert all(inbox.is_complete for inbox in inboxes)


def test_the_producers_of_a_host_declare_together() -> None:
    tracker = ExchangeTracker(4, 3)
    assert tracker.declare([0, 1], {2: 5}) == []
    assert tracker.undeclared == {2, 3}
    assert tracker.declare([0, 1], {2: 5}) == []
    assert tracker.declare([3, 2], {}) == [Expected(0, 0), Expected(1, 0), Expected(2, 5)]
    with pytest.raises(Conflict, match=r"producers \[0\] have declared"):
        tracker.declare([0], {2: 5})


@pytest.mark.parametrize(("producers", "counts"), [([4], {}), ([0], {3: 1}), ([0], {1: -1})])
def test_declarations_are_checked(producers: list[int], counts: dict[int, int]) -> None:
    with pytest.raises(InvalidInput, match="among 4 producers and 3 consumers"):
        ExchangeTracker(4, 3).declare(producers, counts)


def test_the_death_of_a_producer_is_told_to_all_once() -> None:
    tracker = ExchangeTracker(2, 2)
    tracker.declare([0], {})
    assert tracker.fail(0, "too late to matter") == []
    failed = tracker.fail(1, "host 'h3' died")
    assert [each.consumer for each in failed] == [0, 1]
    assert tracker.fail(1, "again") == tracker.declare([1], {}) == []
    inbox = Inbox(0)
    inbox.fail(failed[0])
    with pytest.raises(
        Unavailable, match="consumer 0 lacks messages of producer 1 of an exchange: host 'h3' died"
    ):
        _ = inbox.is_complete


def test_more_messages_than_declared_are_refused() -> None:
    inbox = Inbox(1)
    inbox.receive(0, 0)
    with pytest.raises(Conflict, match="has 1 messages, declared are 0"):
        inbox.expect(Expected(1, 0))
    inbox.expect(Expected(1, 1))
    with pytest.raises(Conflict, match="message 4 of producer 2, one more than the 1"):
        inbox.receive(2, 4)
