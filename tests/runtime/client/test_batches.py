"""Calls that are not traced: sent together, in order, and freed when nobody can read them."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import pytest

from waystation.runtime.client.backend import Backend
from waystation.runtime.client.client import BATCH_CALLS, Client
from waystation.runtime.client.local import LocalCluster


class CountingBackend(Backend):
    """Counts what is sent."""

    def __init__(self) -> None:
        super().__init__(LocalCluster({"left": 2}).connect())
        self.installed = self.ran = 0
        self.freed: list[int] = []

    def install(self, program: Any) -> str:
        self.installed += 1
        return super().install(program)

    def run(self, *args: Any, **options: Any) -> None:
        self.ran += 1
        super().run(*args, **options)

    def free(self, handles: Any) -> None:
        super().free(handles)
        self.freed += handles


@pytest.fixture
def backend():
    return CountingBackend()


@pytest.fixture
def client(backend: CountingBackend):
    with Client(backend) as client:
        yield client


@pytest.fixture
def step(client: Client):
    on = client.make_virtual_device_set().add_slice(devices=2)
    return client.jit(lambda x: x + 1, on)


def chain(step: Any, x: Any, count: int) -> Any:
    for _ in range(count):
        x = step(x)
    return x


def test_a_read_sends_what_waits(backend: CountingBackend, step: Any) -> None:
    last = chain(step, np.zeros(2), 10)
    assert backend.ran == 0
    assert last.tolist() == [10, 10]
    assert backend.ran == 1


def test_many_calls_are_sent(backend: CountingBackend, step: Any) -> None:
    last = chain(step, np.zeros(2), 2 * BATCH_CALLS)
    assert backend.ran == 2
    assert last.tolist() == [2 * BATCH_CALLS] * 2


def test_equal_batches_are_one_program(backend: CountingBackend, step: Any) -> None:
    for _ in range(5):
        assert chain(step, np.zeros(2), 3).tolist() == [3, 3]
    assert (backend.installed, backend.ran) == (1, 5)


def test_memory_that_waits_to_be_freed_is_sent(
    backend: CountingBackend, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waystation.runtime.client.client.BATCH_UNREADABLE_BYTES", 1000)
    chain(step, np.zeros(1000, "float32"), 3)
    assert backend.ran > 0


def test_what_is_dropped_is_freed(client: Client, backend: CountingBackend, step: Any) -> None:
    first = step(np.zeros(2))
    second = step(first)
    assert second.tolist() == [2, 2]
    kept = second.reference.handle
    del first
    gc.collect()
    deadline = time.monotonic() + 60
    while len(backend.freed) < 2 and time.monotonic() < deadline:  # the argument and the first result
        time.sleep(0.01)
    assert len(backend.freed) == 2
    assert kept not in backend.freed
    assert second.is_ready()


def test_shared_arrays_are_read_by_name(client: Client, step: Any) -> None:
    client.share(step(np.zeros(2)), "base")
    found = client.named("base")
    assert step(found).tolist() == [2, 2]
