"""The stores of torch, each as sessions need it, and what stays of them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from tests.coordination.scenarios import hold_store
from tests.support.programs import running

from waystation.coordination.store_coordinator import StoreCoordinator
from waystation.coordination.torch_distributed import TorchStore
from waystation.errors import Unavailable

HANG_S = 60.0


def tcp() -> Any:
    return torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TorchStore:
    kept: Any = {
        "tcp": tcp,
        "file": lambda: torch.distributed.FileStore(str(tmp_path / "store"), 1),
        "hash": torch.distributed.HashStore,
    }[request.param]()
    prefixed = torch.distributed.PrefixStore("outer", torch.distributed.PrefixStore("inner/", kept))
    return TorchStore(lambda: prefixed)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < until, "a hang"
        time.sleep(0.005)


def test_values_are_put_read_and_removed(store: TorchStore) -> None:
    store.set("a/1", b"\x00\xff")
    store.set("a/2", b"2")
    assert store.get("a/1", 10) == b"\x00\xff"
    assert store.read("a", ["2", "1", "absent"]) == [b"2", b"\x00\xff", None]
    assert store.read("a", ["1", "2"]) == [b"\x00\xff", b"2"]
    store.delete(["a/1", "absent"])
    assert store.get("a/1", 0) is None
    assert store.read("a", ["1", "2"]) == [None, b"2"]


@pytest.mark.parametrize("raised", [TimeoutError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("ask", ["get", "read"])
def test_what_a_signal_handler_raises_is_not_the_stores(
    store: TorchStore, ask: str, raised: type[BaseException]
) -> None:
    def handle(*_: object) -> None:
        raise raised("of the program")

    asked = threading.Event()

    def work(_: Any) -> None:
        asked.set()
        time.sleep(0.2)

    before = signal.signal(signal.SIGUSR1, handle)
    interrupter = threading.Thread(target=lambda: asked.wait(HANG_S) and os.kill(os.getpid(), signal.SIGUSR1))
    try:
        if ask == "get":
            threading.Timer(0.2, asked.set).start()
        interrupter.start()
        with pytest.raises(raised, match="of the program"):
            store.get("absent", HANG_S) if ask == "get" else store._call(work)
    finally:
        interrupter.join()
        signal.signal(signal.SIGUSR1, before)
    store.set("absent", b"1")
    assert store.get("absent", HANG_S) == b"1"


def test_what_is_put_once_stays(store: TorchStore) -> None:
    assert store.set_once("a", b"first\x00")
    assert not store.set_once("a", b"second")
    assert store.get("a", 0) == b"first\x00"
    store.delete(["a"])
    assert store.set_once("a", b"third")


def test_numbers_are_added(store: TorchStore) -> None:
    assert [store.add("n", 1), store.add("n", 2), store.add("n", 0)] == [1, 3, 3]


def test_a_wait_can_be_looked_at_again_and_again(
    store: TorchStore, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [store.get("late", 0.02) for _ in range(5)] == [None] * 5
    assert store.get("late", 0) is None
    store.set("late", b"here")
    assert store.get("late", 10) == b"here"
    assert capfd.readouterr() == ("", ""), "torch has warned of a wait that timed out"


def test_a_call_that_waits_keeps_no_other_waiting(store: TorchStore) -> None:
    values: list[Any] = []

    def use(number: int) -> None:
        if number % 2:
            store.set(f"k/{number}", b"%d" % number)
        else:
            values.append(store.get(f"k/{number + 1}", HANG_S))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(values, key=int) == [b"%d" % number for number in range(1, 16, 2)]


def test_what_is_removed_while_it_is_read_is_absent(store: TorchStore) -> None:
    """Two threads, one of which puts and removes what the other reads."""
    stop = threading.Event()
    found: set[bytes | None] = set()

    def read() -> None:
        while not stop.is_set():
            found.update(store.read("a", ["1", "2"]))
            found.add(store.get("a/1", 0))
            if store.host is not None:
                found.add(store.get("a/2", 0.001))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(300):
        store.set("a/1", b"value")
        store.set("a/2", b"value")
        store.delete(["a/1", "a/2"])
    stop.set()
    store.set("a/2", b"value")  # for a wait that still goes on
    thread.join()
    assert found <= {b"value", None}
    assert b"value" in found


class StandingStill:
    """A client whose server stands still for a while, once it has said what is there."""

    def __init__(self, client: Any, server: int) -> None:
        self._client = client
        self._server: int | None = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def clone(self) -> StandingStill:
        return self

    def check(self, keys: list[str]) -> bool:
        found = bool(self._client.check(keys))
        if self._server is not None:
            os.kill(self._server, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, [self._server, signal.SIGCONT]).start()
            self._server = None
        return found


def test_what_a_busy_server_gives_late_is_not_called_absent(tmp_path: Path) -> None:
    with running(hold_store, count=1, framework="torch", directory=tmp_path) as programs:
        client = torch.distributed.TCPStore("127.0.0.1", programs.report(0), is_master=False)
        client.set("a/1", b"value")
        stores = [StandingStill(client, programs.process_id(0)) for _ in range(2)]
        assert TorchStore(lambda: stores[0]).get("a/1", 0) == b"value"
        assert TorchStore(lambda: stores[1]).read("a", ["1", "absent"]) == [b"value", None]
        programs.send(0, None)
        assert programs.values() == [None]


def test_a_server_that_is_gone_is_named() -> None:
    server = tcp()
    client = torch.distributed.TCPStore("127.0.0.1", server.port, 1, is_master=False, wait_for_workers=False)
    store = TorchStore(lambda: client)
    store.set("a", b"1")
    del server
    gc.collect()
    with pytest.raises(Unavailable, match=r"does not answer: process 0, which holds it, has died") as raised:
        StoreCoordinator(store, 1, 2)
    assert raised.value.context == {"process": 0}


def test_the_server_is_not_kept_alive() -> None:
    """Or a program could not make another at the same address."""
    servers = [tcp()]
    port = servers[0].port
    store = TorchStore(lambda: servers[0])
    store.set("a", b"1")
    servers.clear()
    gc.collect()
    with pytest.raises(Unavailable):
        store.get("a", 0)
    again = torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True)
    assert not again.check(["a"])


def test_connections_end_with_their_store() -> None:
    def connections() -> int:
        return sum(thread.name == "waystation-store" for thread in threading.enumerate())

    gc.collect()
    wait_until(lambda: connections() == 0)
    kept = torch.distributed.HashStore()
    store = TorchStore(lambda: kept)
    store.set("a", b"1")
    assert connections() == 1
    del store
    gc.collect()
    wait_until(lambda: connections() == 0)
