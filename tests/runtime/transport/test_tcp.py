"""The transport between two ends of one process: what is offered is fetched, and what fails says why."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import (
    Cancelled,
    Conflict,
    InvalidInput,
    Unavailable,
    WaystationError,
)
from waystation.runtime.errors import HostLost
from waystation.runtime.transport import Key, TcpTransport, Wanted

SECRET = b"a secret of the tests"
DEADLINE_S = 120.0


@pytest.fixture(scope="module", params=[True, False], ids=["memory", "network"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TcpTransport, TcpTransport]]:
    """A producer and a consumer, which reads its memory or not."""
    producer = TcpTransport("producer", SECRET)
    consumer = TcpTransport("consumer", SECRET, reads_memory=request.param)
    yield producer, consumer
    for end in (producer, consumer):
        end.close()


Pair = tuple[TcpTransport, TcpTransport]
RUNS = iter(range(1 << 30))


@pytest.fixture
def run() -> int:
    return next(RUNS)


def wanted(key: Key, like: np.ndarray, into: np.ndarray | None = None) -> Wanted:
    return Wanted(key, like.shape, like.dtype, into)


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread is about to do."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("asked_first", [True, False])
def test_whoever_comes_first_waits_for_the_other(pair: Pair, run: int, asked_first: bool) -> None:
    producer, consumer = pair
    arrays = {
        Key(run, 3, 0): np.arange(3_000_001, dtype=np.int32),
        Key(run, 3, 1): np.float64(7.5).reshape(()),
        Key(run, 3, 2): np.zeros((0, 4), np.int16),
        Key(run, 3, 3): np.arange(60).astype(ml_dtypes.bfloat16).reshape(3, 4, 5),
        Key(run, 4, 3): np.arange(200_000).reshape(400, 500)[:, ::2],
    }
    if not asked_first:
        producer.offer(arrays)
    fetch = consumer.fetch(
        producer.address, [wanted(*item) for item in arrays.items()], deadline_s=DEADLINE_S
    )
    if asked_first:
        with pytest.raises(TimeoutError, match="have not come within"):
            fetch.result(0.01)
        assert not fetch.done()
        producer.offer(arrays)
    for got, sent in zip(fetch.result(), arrays.values(), strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
        assert got.flags.writeable
    assert fetch.done()
    assert len(fetch.result()) == len(arrays)
    until(lambda: producer.held_bytes == 0)


def test_jax_takes_over_what_was_fetched(pair: Pair, run: int) -> None:
    producer, consumer = pair
    source = np.arange(50_000, dtype=np.float32)
    small = np.arange(5, dtype=np.float32)
    producer.offer({Key(run, 0, 0): small, Key(run, 0, 1): source})
    asked = [wanted(Key(run, 0, 0), small), wanted(Key(run, 0, 1), source)]
    for block in consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S).result():
        assert block.ctypes.data % 256 == 0
        array = jax.device_put(block, jax.devices("cpu")[0])
        assert array.unsafe_buffer_pointer() == block.ctypes.data


def test_blocks_are_fetched_into_arrays_of_the_callers(pair: Pair, run: int) -> None:
    producer, consumer = pair
    source = np.arange(300_000, dtype=np.int64).reshape(2, 150_000)
    whole = np.zeros((3, 150_000), np.int64)
    producer.offer({Key(run, 0, 0): source})
    asked = [wanted(Key(run, 0, 0), source, whole[1:])]
    [got] = consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S).result()
    assert got.base is whole
    np.testing.assert_array_equal(whole[1:], source)
    assert not whole[0].any()


def test_what_cannot_be_fetched_into_is_refused(pair: Pair, run: int) -> None:
    producer, consumer = pair
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    for into in (np.zeros(5), np.zeros(4, np.float32), np.zeros((4, 2))[:, 0], fixed):
        with pytest.raises(InvalidInput, match="fetched into"):
            consumer.fetch(producer.address, [wanted(Key(run, 0, 0), np.zeros(4), into)], deadline_s=1)
    with pytest.raises(InvalidInput, match="no address of a transport"):
        consumer.fetch("127.0.0.1:1", [], deadline_s=1)
    assert consumer.fetch(producer.address, [], deadline_s=1).result() == []


@given(
    data=st.data(),
    sizes=st.lists(st.sampled_from([0, 1, 8, 65_536, 70_000, 262_144, 1_100_000]), min_size=1, max_size=8),
)
def test_blocks_of_all_sizes_come_in_any_order(pair: Pair, data: st.DataObject, sizes: list[int]) -> None:
    producer, consumer = pair
    run = next(RUNS)
    chance = np.random.default_rng(run)
    blocks = {
        Key(run, 1, number): chance.integers(0, 255, size, np.uint8) for number, size in enumerate(sizes)
    }
    events = data.draw(
        st.permutations([("offer", key) for key in blocks] + [("fetch", key) for key in blocks])
    )
    fetches = {}
    for kind, key in events:
        if kind == "offer":
            producer.offer({key: blocks[key]})
        else:
            asked = [wanted(key, blocks[key])]
            fetches[key] = consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S)
    for key, fetch in fetches.items():
        np.testing.assert_array_equal(fetch.result()[0], blocks[key])


def test_arrays_are_let_go_once_they_are_fetched_or_dropped(pair: Pair, run: int) -> None:
    producer, consumer = pair
    arrays = [np.full(100_000, at, np.int64) for at in range(3)]
    alive = [weakref.ref(array) for array in arrays]
    for at in range(3):
        producer.offer({Key(run, at, 0): arrays[at]})
    asked = [wanted(Key(run, 0, 0), arrays[0])]
    del arrays[:]
    consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S).result()
    until(lambda: alive[0]() is None)
    assert producer.held_bytes == 2 * 800_000
    producer.drop(run, 1)
    until(lambda: alive[1]() is None)
    producer.drop(run)
    until(lambda: alive[2]() is None)
    assert producer.held_bytes == 0


def test_who_waits_for_a_run_that_is_dropped_is_told(pair: Pair, run: int) -> None:
    producer, consumer = pair
    fetch = consumer.fetch(producer.address, [wanted(Key(run, 2, 0), np.zeros(4))], deadline_s=DEADLINE_S)
    producer.drop(run)
    with pytest.raises(Cancelled, match=f"run {run} was dropped here .*host: producer"):
        fetch.result()
    late = consumer.fetch(producer.address, [wanted(Key(run, 2, 1), np.zeros(4))], deadline_s=DEADLINE_S)
    with pytest.raises(Cancelled, match="was dropped"):
        late.result()
    own = consumer.fetch(producer.address, [wanted(Key(run + 1, 2, 0), np.zeros(4))], deadline_s=DEADLINE_S)
    consumer.drop(run + 1, 2)
    with pytest.raises(Cancelled, match=f"run {run + 1} of epoch 2 was dropped"):
        own.result()
    next(RUNS)


def test_a_run_that_is_poisoned_fails_with_the_reason(pair: Pair, run: int) -> None:
    producer, consumer = pair
    here, there = (
        consumer.fetch(producer.address, [wanted(Key(at, 0, 0), np.zeros(4))], deadline_s=DEADLINE_S)
        for at in (run, run + 1)
    )
    next(RUNS)
    consumer.poison(HostLost("host 'east/1' was lost", host="east/1"), run=run)
    for _ in range(2):
        with pytest.raises(HostLost, match="east/1") as caught:
            here.result()
        assert caught.value.context["host"] == "east/1"
    producer.poison(HostLost("host 'east/1' was lost"), run=run + 1)
    with pytest.raises(Unavailable, match="host 'east/1' was lost"):
        there.result()


def test_a_host_that_is_lost_fails_all_who_wait_for_it() -> None:
    producer, consumer = TcpTransport("lost", SECRET), TcpTransport("left", SECRET)
    asked = [wanted(Key(0, 0, 0), np.zeros(4))]
    fetch = consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S)
    waited: list[WaystationError] = []

    def wait() -> None:
        with pytest.raises(HostLost) as caught:
            fetch.result()
        waited.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    consumer.poison(HostLost("host 'lost' was stuck"), address=producer.address)
    thread.join(DEADLINE_S)
    assert waited
    with pytest.raises(HostLost, match="stuck"):
        consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S).result()
    for end in (producer, consumer):
        end.close()


def test_a_deadline_ends_the_wait_and_the_request(pair: Pair, run: int) -> None:
    producer, consumer = pair
    key = Key(run, 0, 0)
    late = consumer.fetch(producer.address, [wanted(key, np.zeros(4))], deadline_s=0.05)
    until(late.done)
    with pytest.raises(Unavailable, match="1 blocks have not come before their deadline"):
        late.result()
    producer.offer({key: np.arange(4.0)})
    [again] = consumer.fetch(producer.address, [wanted(key, np.zeros(4))], deadline_s=DEADLINE_S).result()
    np.testing.assert_array_equal(again, np.arange(4.0))


def test_a_block_of_another_size_is_refused(pair: Pair, run: int) -> None:
    producer, consumer = pair
    producer.offer({Key(run, 0, 0): np.zeros(4)})
    fetch = consumer.fetch(producer.address, [wanted(Key(run, 0, 0), np.zeros(5))], deadline_s=DEADLINE_S)
    with pytest.raises(InvalidInput, match="32 bytes is offered where one of 40 is asked for"):
        fetch.result()
    producer.drop(run)


def test_a_key_is_offered_once_and_asked_for_once(pair: Pair, run: int) -> None:
    producer, consumer = pair
    producer.offer({Key(run, 0, 0): np.zeros(4)})
    with pytest.raises(Conflict, match=f"offered twice: transfer 0 of run {run} in epoch 0"):
        producer.offer({Key(run, 0, 1): np.zeros(4), Key(run, 0, 0): np.zeros(4)})
    assert producer.held_bytes == 32
    first, second = (
        consumer.fetch(producer.address, [wanted(Key(run, 0, 1), np.zeros(4))], deadline_s=DEADLINE_S)
        for _ in range(2)
    )
    with pytest.raises(Conflict, match="asked for the same block"):
        first.result()
    producer.offer({Key(run, 0, 1): np.ones(4)})
    np.testing.assert_array_equal(second.result()[0], np.ones(4))
    producer.drop(run)


def test_who_begins_a_run_waits_for_room(pair: Pair, run: int) -> None:
    producer, consumer = pair
    source = np.zeros(1000)
    producer.offer({Key(run, 0, 0): source})
    producer.wait_for_room(8001, deadline_s=0)
    with pytest.raises(Unavailable, match="1 blocks of 8000 bytes are offered and have not been fetched"):
        producer.wait_for_room(8000, deadline_s=0.01)
    waiting = threading.Thread(target=producer.wait_for_room, args=(8000,), kwargs={"deadline_s": DEADLINE_S})
    waiting.start()
    consumer.fetch(producer.address, [wanted(Key(run, 0, 0), source)], deadline_s=DEADLINE_S).result()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()


def test_only_hosts_of_the_cluster_are_served() -> None:
    with pytest.raises(InvalidInput, match="at least 16 bytes"):
        TcpTransport("host", b"short")
    with pytest.raises(InvalidInput, match="not on all"):
        TcpTransport("host", SECRET, "0.0.0.0")
    with pytest.raises(InvalidInput, match="no address to listen at"):
        TcpTransport("host", SECRET, "localhost")
    producer = TcpTransport("host", SECRET)
    with pytest.raises(Conflict, match="cannot listen"):
        TcpTransport("other", SECRET, producer.address.rpartition("@")[2])
    asked = [wanted(Key(0, 0, 0), np.zeros(4))]
    stranger = TcpTransport("stranger", SECRET[::-1])
    with pytest.raises(InvalidInput, match=r"host 'host' at .* gives no blocks: .*secret"):
        stranger.fetch(producer.address, asked, deadline_s=DEADLINE_S).result()
    consumer = TcpTransport("consumer", SECRET)
    elsewhere = producer.address.replace("host@", "host of an earlier epoch@")
    with pytest.raises(InvalidInput, match="another host"):
        consumer.fetch(elsewhere, asked, deadline_s=DEADLINE_S).result()
    for end in (producer, stranger, consumer):
        end.close()


def test_nobody_waits_for_what_is_closed() -> None:
    producer, consumer = TcpTransport("producer", SECRET), TcpTransport("consumer", SECRET)
    asked = [wanted(Key(0, 0, 0), np.zeros(4))]
    held = np.zeros(4)
    alive = weakref.ref(held)
    producer.offer({Key(1, 0, 0): held})
    del held
    fetch = consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S)
    consumer.close()
    with pytest.raises(Cancelled, match="closed"):
        fetch.result()
    with pytest.raises(Cancelled, match="closed"):
        consumer.fetch(producer.address, asked, deadline_s=DEADLINE_S).result()
    with pytest.raises(Cancelled, match="closed"):
        consumer.offer({Key(0, 0, 0): np.zeros(4)})
    producer.close()
    producer.close()
    assert alive() is None
