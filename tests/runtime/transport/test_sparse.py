"""Sparse exchanges between processes: each consumer gets all that was sent to it, or hears who failed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.transport.processes import LONG_S, SECRET, host_processes

from waystation.errors import Conflict, InvalidInput, Unavailable
from waystation.runtime.transport import TcpTransport
from waystation.runtime.transport.sparse import Consumer, Exchange, Producer, Tracker

EXAMPLE = Path(__file__).parents[3] / "examples" / "route_tokens.py"
ROW = np.dtype(np.int64)


def exchange_of(
    producers: tuple[str, ...], consumers: tuple[str, ...], tracker: str, run: int = 1
) -> Exchange:
    return Exchange(run, 1, 10, producers, consumers, tracker, (2,), ROW, LONG_S)


def routed(seed: int, producer: int, consumers: int) -> dict[int, np.ndarray]:
    """What a producer sends: to some consumers, some rows."""
    chance = np.random.default_rng([seed, producer])
    chosen = chance.permutation(consumers)[: chance.integers(0, consumers + 1)]
    return {int(at): chance.integers(0, 1000, (chance.integers(0, 50), 2)) for at in chosen}


def produce(transport: TcpTransport, exchange: Exchange, number: int, seed: int) -> None:
    producer = Producer(transport, exchange, number)
    for consumer, rows in routed(seed, number, len(exchange.consumers)).items():
        producer.send(consumer, rows)
    producer.finish()


def consume(transport: TcpTransport, exchange: Exchange, number: int) -> dict[int, np.ndarray]:
    return Consumer(transport, exchange, number).receive()


def test_tokens_are_routed_between_processes() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE, "--hosts", "3", "--tokens", "200"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"host (\d): (\d+) tokens came from (\d) hosts", done.stdout)
    assert [host for host, _, _ in found] == ["0", "1", "2"]
    assert sum(int(count) for _, count, _ in found) == 600
    assert found[-1][1:] == ("0", "0")


def test_any_subset_is_sent_and_all_of_it_comes() -> None:
    own = TcpTransport("tracker", SECRET)
    with host_processes("a", "b") as hosts:
        addresses = tuple(host.address() for host in hosts)
        producers, consumers = addresses * 2, addresses + addresses[:1]
        for seed in range(12):
            exchange = exchange_of(producers, consumers, own.address, run=seed)
            tracker = Tracker(own, exchange)
            for number in range(4):
                hosts[number % 2].tell(produce, exchange, number, seed)
            for number in range(3):
                hosts[number % 2].tell(consume, exchange, number)
            tracker.run()
            assert [hosts[number % 2].told() for number in range(4)] == [None] * 4
            sent = [routed(seed, number, 3) for number in range(4)]
            for consumer in range(3):
                came = hosts[consumer % 2].told()
                expected = {at: sent[at][consumer] for at in range(4) if len(sent[at].get(consumer, ()))}
                assert came.keys() == expected.keys()
                for at, rows in expected.items():
                    np.testing.assert_array_equal(came[at], rows)
    own.close()


def test_a_producer_that_is_killed_is_named_to_all_consumers() -> None:
    own = TcpTransport("tracker", SECRET)
    with host_processes("victim", "steady", "consumer") as (victim, steady, consumer):
        exchange = exchange_of((victim.address(), steady.address()), (consumer.address(),) * 2, own.address)
        tracker = Tracker(own, exchange)
        steady.call(produce, exchange, 1, 5)
        consumer.tell(consume, exchange, 1)
        victim.kill()
        reason = "producer 0 of an exchange: host 'victim' .* gives no blocks"
        with pytest.raises(Unavailable, match=reason):
            tracker.run()
        with pytest.raises(Unavailable, match=reason):
            consumer.told()
        with pytest.raises(Unavailable, match=reason):
            consumer.call(consume, exchange, 0)
    own.close()


def test_what_is_sent_is_checked() -> None:
    own = TcpTransport("own", SECRET)
    producer = Producer(own, exchange_of((own.address,), (own.address,), own.address), 0)
    for rows in (np.zeros((3, 3), ROW), np.zeros((3, 2)), np.zeros((), ROW)):
        with pytest.raises(InvalidInput, match="rows of shape"):
            producer.send(0, rows)
    with pytest.raises(InvalidInput, match="no consumer 1 among 1"):
        producer.send(1, np.zeros((3, 2), ROW))
    producer.send(0, np.zeros((0, 2), ROW))
    producer.send(0, np.zeros((3, 2), ROW))
    with pytest.raises(Conflict, match="producer 0 has sent rows to consumer 0 before"):
        producer.send(0, np.zeros((3, 2), ROW))
    own.close()
