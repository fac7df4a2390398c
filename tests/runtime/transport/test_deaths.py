"""Hosts that die or stand still: who waits for them is told, and what they held up is let go."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest
from tests.runtime.transport.processes import LONG_S, SECRET, HostProcess, host_processes

from waystation.errors import Unavailable
from waystation.runtime.errors import HostLost
from waystation.runtime.transport import Key, TcpTransport, Wanted

LARGE = 64 << 20


def offer(transport: TcpTransport, key: Key, nbytes: int) -> None:
    transport.offer({key: np.full(nbytes, 7, np.uint8)})


def wanted(key: Key, nbytes: int) -> list[Wanted]:
    return [Wanted(key, (nbytes,), np.dtype(np.uint8))]


def test_the_death_of_a_producer_is_told_to_who_waits_for_it() -> None:
    with host_processes("victim", "other") as (victim, other):
        address, elsewhere = victim.address(), other.address()
        own = TcpTransport("own", SECRET)
        other.call(offer, Key(1, 0, 9), 100)
        waiting = own.fetch(address, wanted(Key(1, 0, 0), 100), deadline_s=LONG_S)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        began = time.monotonic()
        victim.kill()
        with pytest.raises(Unavailable, match=r"host 'victim' at .* gives no blocks"):
            waiting.result()
        assert time.monotonic() - began < LONG_S
        with pytest.raises(Unavailable, match="cannot be reached"):
            own.fetch(address, wanted(Key(1, 0, 1), 100), deadline_s=LONG_S).result()
        [block] = own.fetch(elsewhere, wanted(Key(1, 0, 9), 100), deadline_s=LONG_S).result()
        assert block.tolist() == [7] * 100
        own.close()


@pytest.mark.parametrize("reads_memory", [True, False])
@pytest.mark.share(2)
def test_a_producer_killed_while_it_sends_leaves_no_block_half(reads_memory: bool) -> None:
    """Whatever comes whole is right; the rest fails."""
    with host_processes("victim") as (victim,):
        own = TcpTransport("own", SECRET, reads_memory=reads_memory)
        address = victim.address()
        for number in range(4):
            victim.call(offer, Key(1, 0, number), LARGE)
        fetches = [
            own.fetch(address, wanted(Key(1, 0, number), LARGE), deadline_s=LONG_S) for number in range(4)
        ]
        fetches[0].result()
        victim.kill()
        for fetch in fetches:
            with contextlib.suppress(Unavailable):
                [block] = fetch.result()
                assert (block == 7).all()
        own.close()


def test_a_producer_that_stands_still_is_waited_for_until_it_is_poisoned() -> None:
    with host_processes("stuck") as (stuck,):
        own = TcpTransport("own", SECRET, reads_memory=False)
        address = stuck.address()
        own.fetch(address, [], deadline_s=1).result()
        assert stuck.process.pid is not None
        os.kill(stuck.process.pid, signal.SIGSTOP)
        short = own.fetch(address, wanted(Key(1, 0, 0), 10), deadline_s=0.2)
        long = own.fetch(address, wanted(Key(1, 0, 1), 10), deadline_s=LONG_S)
        with pytest.raises(Unavailable, match="before their deadline"):
            short.result()
        own.poison(HostLost("host 'stuck' does not get on"), address=address)
        with pytest.raises(HostLost, match="does not get on"):
            long.result()
        own.close()


def ask_and_forget(transport: TcpTransport, address: str, key: Key, nbytes: int) -> None:
    STANDING.append(transport.fetch(address, wanted(key, nbytes), deadline_s=LONG_S))


STANDING: list[object] = []


def test_the_death_of_a_consumer_leaves_blocks_offered_until_they_are_dropped() -> None:
    with host_processes("first", "second") as (first, second):
        own = TcpTransport("own", SECRET)
        first.call(ask_and_forget, own.address, Key(1, 0, 0), 1000)
        first.kill()
        own.offer({Key(1, 0, 0): np.full(1000, 7, np.uint8), Key(1, 0, 1): np.zeros(LARGE, np.uint8)})
        second.call(fetched_sum, own.address, Key(1, 0, 0), 1000)
        assert own.held_bytes >= LARGE
        own.drop(1)
        assert held_at_end(own) == 0  # what was being sent to the dead one is held until that is known
        own.close()


def fetched_sum(transport: TcpTransport, address: str, key: Key, nbytes: int) -> int:
    [block] = transport.fetch(address, wanted(key, nbytes), deadline_s=LONG_S).result()
    return int(block.sum())


def test_hosts_of_two_processes_exchange_both_ways_at_once() -> None:
    with host_processes("left", "right", reads_memory=False) as hosts:
        addresses = [host.address() for host in hosts]
        for host, other, number in zip(hosts, addresses[::-1], (0, 1), strict=True):
            host.tell(exchange, other, number)
        assert [host.told() for host in hosts] == [
            [(1 - at) * 16 + step for step in range(16)] for at in (0, 1)
        ]
        assert [host.call(held_at_end) for host in hosts] == [0, 0]


def exchange(transport: TcpTransport, other: str, number: int) -> list[int]:
    """Each offers blocks of 4 MiB to the other, and takes the other's."""
    nbytes = 4 << 20
    transport.offer(
        {Key(5, number, step): np.full(nbytes, number * 16 + step, np.uint8) for step in range(16)}
    )
    asked = [each for step in range(16) for each in wanted(Key(5, 1 - number, step), nbytes)]
    blocks = transport.fetch(other, asked, deadline_s=LONG_S).result()
    assert all((block == block[0]).all() for block in blocks)
    return [int(block[0]) for block in blocks]


def held_at_end(transport: TcpTransport) -> int:
    end = time.monotonic() + LONG_S
    while transport.held_bytes and time.monotonic() < end:
        time.sleep(0.001)
    return transport.held_bytes


def test_a_process_ends_while_others_wait_for_it() -> None:
    """The interpreter goes away by itself, with blocks offered and asked for."""
    own = TcpTransport("own", SECRET)
    leaving = HostProcess("leaving")
    address = leaving.address()
    leaving.call(offer, Key(1, 0, 0), 1000)
    leaving.call(ask_and_forget, own.address, Key(2, 0, 0), 1000)
    fetch = own.fetch(address, wanted(Key(1, 0, 1), 1000), deadline_s=LONG_S)
    leaving.leave()
    assert leaving.process.exitcode == 0
    with pytest.raises(Unavailable, match="leaving"):
        fetch.result()
    own.close()
