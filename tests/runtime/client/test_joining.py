"""Programs that run again and again: their chains are compiled as one, and nobody sees a difference."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest

from waystation import runtime
from waystation.runtime.client.backend import Backend
from waystation.runtime.client.client import Client
from waystation.runtime.client.joining import JOINED_AFTER_RUNS, SMALL_CODE_BYTES
from waystation.runtime.client.local import LocalCluster
from waystation.runtime.errors import ComputationFailed

WAIT_S = 120.0


class WatchedBackend(Backend):
    """Says when a program has been prepared, and what has run."""

    def __init__(self) -> None:
        super().__init__(LocalCluster({"left": 2}).connect())
        self.prepared: list[str] = []
        self.is_prepared = threading.Event()
        self.ran: list[str] = []
        self.refuses = False

    def prepare(self, fingerprint: str, slices: Any) -> None:
        try:
            if self.refuses:
                raise ComputationFailed("it cannot be compiled")
            super().prepare(fingerprint, slices)
            self.prepared.append(fingerprint)
        finally:
            self.is_prepared.set()

    def run(self, fingerprint: str, *args: Any, **options: Any) -> None:
        self.ran.append(fingerprint)
        super().run(fingerprint, *args, **options)


@pytest.fixture
def backend() -> WatchedBackend:
    return WatchedBackend()


@pytest.fixture
def client(backend: WatchedBackend):
    with Client(backend) as client:
        yield client


def steps(function: Any, count: int, x: Any) -> np.ndarray:
    for _ in range(count):
        x = function(x)
    return x.numpy()


def run_until_joined(backend: WatchedBackend, work: Any) -> None:
    """Runs a program until what it has been joined to runs in its stead."""
    for _ in range(JOINED_AFTER_RUNS):
        work()
    assert backend.is_prepared.wait(WAIT_S)
    threads = [each for each in threading.enumerate() if each.name == "waystation: joins"]
    for thread in threads:
        thread.join(WAIT_S)


def test_a_chain_gives_the_same_bits(client: Client, backend: WatchedBackend) -> None:
    def function(x: Any) -> Any:
        return x * 1.1 + x / 3.0  # which a compiler could contract with what comes before and after

    on = client.make_virtual_device_set().add_slice(devices=2)
    placed = client.jit(function, on)
    x = np.linspace(0.1, 3.0, 64, dtype="float32")
    plain = x
    for _ in range(5):
        plain = jax.jit(function)(plain)
    run_until_joined(backend, lambda: np.testing.assert_array_equal(steps(placed, 5, x), plain))
    assert len(set(backend.ran)) == 1
    np.testing.assert_array_equal(steps(placed, 5, x), plain)
    assert backend.ran[-1] == backend.prepared[0] != backend.ran[0]


def test_what_cannot_be_compiled_goes_on_as_it_is(client: Client, backend: WatchedBackend) -> None:
    backend.refuses = True
    on = client.make_virtual_device_set().add_slice(devices=2)
    placed = client.jit(lambda x: x + 1, on)
    run_until_joined(backend, lambda: steps(placed, 3, np.zeros(2)))
    assert steps(placed, 3, np.zeros(2)).tolist() == [3, 3]
    assert len(set(backend.ran)) == 1


def test_who_wants_it_keeps_the_calls_of_a_program(client: Client, backend: WatchedBackend) -> None:
    on = client.make_virtual_device_set().add_slice(devices=2)
    placed = client.jit(lambda x: x + 1, on)

    def three(x: Any) -> Any:
        return placed(placed(placed(x)))

    kept, joined = runtime.program(three, join_chains=False), runtime.program(three)
    x = client.put(np.zeros(2), on)
    for _ in range(2 * JOINED_AFTER_RUNS):
        assert kept(x).numpy().tolist() == [3, 3]
    assert len(set(backend.ran)) == 1
    assert not backend.is_prepared.is_set()
    # Another of the same structure, which does not keep them, is another program.
    run_until_joined(backend, lambda: joined(x).numpy())
    assert joined(x).numpy().tolist() == [3, 3]
    assert backend.ran[-1] == backend.prepared[0]


def test_large_functions_are_left_alone(client: Client, backend: WatchedBackend) -> None:
    table = np.arange(SMALL_CODE_BYTES, dtype="float32")
    on = client.make_virtual_device_set().add_slice(devices=2)
    placed = client.jit(lambda x: x + table, on)
    for _ in range(2 * JOINED_AFTER_RUNS):
        steps(placed, 2, np.zeros_like(table))
    assert len(set(backend.ran)) == 1
    assert not backend.is_prepared.is_set()
