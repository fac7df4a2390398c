"""Calls of a program over its connection, without Ray: their order, their answers, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Any, TypeVar

import numpy as np
import pytest

from waystation import _native
from waystation._peers import ends_of
from waystation.errors import Internal, InvalidInput, NotFound, Unavailable
from waystation.runtime.cluster import calls as calls_of_programs
from waystation.runtime.cluster.calls import ClientCalls
from waystation.runtime.cluster.connection import Connection
from waystation.runtime.control import packing
from waystation.runtime.control.connector import Connector
from waystation.runtime.control.credentials import CONTROLLER, MOST_BYTES, RUN, Role, issue
from waystation.runtime.control.listener import Listener
from waystation.runtime.control.packing import Packer
from waystation.runtime.control.program_messages import Call, pack_calls
from waystation.runtime.controller import Controller, MemoryLimits
from waystation.runtime.controller.methods import METHODS, ClientMethods
from waystation.runtime.devices import Host, Island
from waystation.runtime.errors import ObjectNotFound
from waystation.runtime.ir import Sharding
from waystation.runtime.resources import SliceRequest

WAIT_S = 120.0
SECRET = b"s" * 32
ONE = Sharding((("d", 1),), (("d",),))
T = TypeVar("T")


class Manager:
    """The part of the manager that takes calls of one program, in an event loop of a thread."""

    def __init__(self) -> None:
        self.controller = Controller()
        self.lost = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.told: list[str] = []
        self.listener = self.run(Listener.start("127.0.0.1", SECRET, self.told.append))
        self.calls = self.run(self._enter())

    async def _enter(self) -> ClientCalls:
        controller = self.controller
        controller.add_island(Island("left", (Host("left/0", "left", 1, "cpu"),)), MemoryLimits())
        calls = ClientCalls(controller.add_client("one"), controller, lambda: None, lambda: None)
        self.listener.expect("one", lambda end: calls.connect(end, self.lost.set))
        return calls

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def end_calls(self) -> None:
        self.calls.close()

    def close(self) -> None:
        self.run(self.end_calls())
        self.run(self.listener.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@pytest.fixture
def manager() -> Iterator[Manager]:
    manager = Manager()
    yield manager
    manager.close()


@pytest.fixture
def connection(manager: Manager) -> Iterator[Connection]:
    connection = Connection(
        None, "one", Connector(manager.listener.address, issue(SECRET, Role.PROGRAM, "one"))
    )
    yield connection
    connection.close()


def test_calls_are_taken_in_order_and_answered(manager: Manager, connection: Connection) -> None:
    number = connection.ask("grant", SliceRequest.of(1))
    for handle in range(3):
        connection.tell("put", handle, np.ones(4), number, ONE)
    assert connection.ask("is_done", 2) is False  # nobody makes it here
    connection.tell("free", (0, 1))
    with pytest.raises(ObjectNotFound, match="has no array 1"):
        connection.ask("is_done", 1)
    connection.tell("run", "no program", (number,), (2,), (7,), None, 0)
    with pytest.raises(NotFound, match="no program 'no program'") as raised:
        connection.ask("wait", (7,))
    assert "In the manager" in raised.value.__notes__[0]
    with pytest.raises(TimeoutError, match="goes on"):
        connection.ask("wait", (2,), timeout_s=0.01)


@pytest.mark.parametrize(
    "method", ["call", "close", "_once", "_controller", "__init__", "__class__", "no such thing"]
)
def test_a_program_can_call_what_is_listed_and_nothing_else(
    manager: Manager, connection: Connection, method: str
) -> None:
    with pytest.raises(InvalidInput, match=f"programs cannot call '{method}'"):
        connection.ask(method)
    connection.tell(method)
    assert connection.ask("grant", SliceRequest.of(1)) == 0  # and goes on


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("grant", ()),
        ("load", ("p", None, 7, None)),
        ("wait", (7,)),
        ("placement", ()),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_and_the_next_one_is_taken(
    manager: Manager, connection: Connection, method: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(Internal, match="the manager raised"):
        connection.ask(method, *arguments)
    # Also where it is not taken at once, since others wait before it.
    waits = [connection.begin(method, *arguments) for _ in range(2 * calls_of_programs._AT_ONCE)]
    for wait in waits:
        with pytest.raises(Internal, match="the manager raised"):
            wait(WAIT_S)
    assert connection.ask("grant", SliceRequest.of(1), timeout_s=WAIT_S) == 0


@pytest.mark.parametrize(
    "body", [b"no pack", b"\xff" * 40, pack_calls([Call("free", ((1, 2),), 1)], Packer())[:-1]]
)
def test_what_is_no_pack_ends_the_connection(manager: Manager, body: bytes) -> None:
    say(manager, body)
    assert manager.lost.wait(WAIT_S)


class Calls:
    """A pickle of it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    ("hostile", "named"),
    [
        (lambda path: Calls(os.system, f"touch '{path}'"), "posix.system"),
        (lambda path: Calls(eval, f"open({str(path)!r}, 'w')"), "builtins.eval"),
        (lambda path: Calls(packing._message, "posix", "system", [f"touch '{path}'"]), "posix.system"),
        (lambda path: Calls(packing._message, "pathlib", "Path.touch", [str(path)]), "pathlib.Path.touch"),
        (lambda path: Calls(packing._error, "waystation.storage", "opened", str(path), {}), "storage.opened"),
        (lambda path: Calls(packing._error, "waystation.__main__", "x", "", {}), "waystation.__main__.x"),
        (lambda path: InvalidInput, "waystation.errors.InvalidInput"),
        (lambda path: SliceRequest, "waystation.runtime.resources.requests.SliceRequest"),
    ],
)
@pytest.mark.parametrize("place", ["in a call", "known"])
def test_the_manager_makes_nothing_of_a_hostile_pickle(
    manager: Manager, tmp_path: Path, hostile: Callable[[Path], Any], named: str, place: str
) -> None:
    path = tmp_path / "written"
    objects = ([hostile(path)], []) if place == "known" else ([], [("share", (1, hostile(path)))])
    pickled = pickle.dumps(objects, 5)
    say(manager, struct.pack("<BQQQ", 0, 0, len(pickled), 0) + pickled)
    assert manager.lost.wait(WAIT_S)
    assert not path.exists()
    (told,) = manager.told
    assert told.startswith("the connection of 'one' is ended: 'one' has sent '")
    assert f"{named}'" in told


def say(manager: Manager, body: bytes) -> None:
    """Sends a message as program 'one' until the manager ends the connection."""
    credential = issue(SECRET, Role.PROGRAM, "one")
    keys = _native.PeerKeys.of_issued(credential.key, credential.controller)
    host, _, port = manager.listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as opened:
        channel = keys.connect(credential.role, credential.name, CONTROLLER, RUN, ends_of(opened), MOST_BYTES)
        while not channel.is_open:
            opened.sendall(channel.take())
            channel.feed(opened.recv(1 << 16))
        opened.sendall(channel.seal(body))
        with contextlib.suppress(ConnectionResetError):
            while opened.recv(1 << 10):
                pass


def test_what_cannot_be_sent_ends_the_connection_and_keeps_nobody_waiting(
    manager: Manager, connection: Connection
) -> None:
    number = connection.ask("grant", SliceRequest.of(1))
    connection.tell("put", 1, np.ones(1), number, ONE)
    waiting = connection.begin("wait", (1,))
    with pytest.raises((AttributeError, PicklingError)):
        connection.tell("share", 1, lambda: "no name")
    for wait in (waiting, lambda timeout_s: connection.ask("is_done", 1, timeout_s=timeout_s)):
        with pytest.raises(Unavailable, match="has ended"):
            wait(WAIT_S)
    assert manager.lost.wait(WAIT_S)


def test_what_fails_that_nobody_waits_for_is_told_to_the_loop(
    manager: Manager, connection: Connection
) -> None:
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    manager._loop.set_exception_handler(lambda loop, context: told.put(context))
    connection.tell("run", "too few arguments", (), (), (), None, "no priority")
    connection.tell("wait", 7)
    context = told.get(timeout=WAIT_S)
    assert context["message"] == "program 'one' has told 'wait', which failed"
    assert isinstance(context["exception"], TypeError)


def test_what_is_listed_is_there() -> None:
    assert {name for name in vars(ClientMethods) if not name.startswith("_") and name != "call"} == METHODS


def test_many_calls_of_several_threads_all_arrive(
    manager: Manager, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_of_programs, "MOST_WAITING", 16)  # so that it is paused again and again
    number = connection.ask("grant", SliceRequest.of(1))
    count = 200

    def put(first: int) -> None:
        for handle in range(first, first + count):
            connection.tell("put", handle, np.ones(1), number, ONE)

    threads = [threading.Thread(target=put, args=(place * count,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not connection.ask("is_done", 2 * count - 1)
    assert not connection.ask("is_done", count - 1)


def test_who_waits_is_told_of_the_end(manager: Manager, connection: Connection) -> None:
    number = connection.ask("grant", SliceRequest.of(1))
    connection.tell("put", 1, np.ones(1), number, ONE)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            connection.ask("wait", (1,))
        except Unavailable as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert connection.ask("is_done", 1) is False  # by now it may wait, or is about to
    manager.run(manager.end_calls())
    waiting.join(WAIT_S)
    assert "has ended" in str(raised[0])
    assert manager.lost.wait(WAIT_S)
    with pytest.raises(Unavailable, match="has ended"):
        connection.tell("free", (1,))
