"""Connections of control: who may have one, what goes over it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waystation.errors import Corrupt, InvalidInput, Unavailable
from waystation.runtime.control import listener as listening
from waystation.runtime.control.connector import Connector
from waystation.runtime.control.frames import Opener, Sealer
from waystation.runtime.control.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Accepting,
    Connecting,
    Credential,
    Role,
    issue,
    key_between_hosts,
)
from waystation.runtime.control.listener import End, Listener

WAIT_S = 120.0
SECRET = b"s" * 32
HOST = issue(SECRET, Role.HOST, "left/0/e1")
PROGRAM = issue(SECRET, Role.PROGRAM, "one")
T = TypeVar("T")


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class Heard:
    """What has come over a connection, in the order in which it came; then None."""

    def __init__(self, loop: Loop, listener: Listener, name: str) -> None:
        self.loop = loop
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.end = listener.end(name)
        loop.run(self._attend())

    async def _attend(self) -> None:
        self.end.attend(self.frames.put_nowait, lambda: self.frames.put_nowait(None))

    def next(self) -> bytes | None:
        return self.loop.run(asyncio.wait_for(self.frames.get(), WAIT_S))

    def send(self, body: bytes) -> None:
        async def send() -> None:
            self.end.send(body)

        self.loop.run(send())


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def listener(loop: Loop) -> Iterator[Listener]:
    listener = loop.run(Listener.start("127.0.0.1", SECRET))
    yield listener
    loop.run(listener.close())


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 40))
def test_frames_come_out_however_their_bytes_come(bodies: list[bytes], size: int) -> None:
    sealer, opener = Sealer(SECRET), Opener(SECRET)
    sent = b"".join(map(sealer.seal, bodies))
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    assert [body for piece in pieces for body in opener.feed(piece)] == bodies


@given(st.data())
def test_a_frame_that_was_changed_or_repeated_is_refused(data: st.DataObject) -> None:
    frame = bytearray(Sealer(SECRET).seal(b"begin"))
    opener = Opener(SECRET)
    assert list(opener.feed(bytes(frame))) == [b"begin"]
    with pytest.raises(Corrupt):
        list(opener.feed(bytes(frame)))
    frame[data.draw(st.integers(8, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        list(Opener(SECRET).feed(bytes(frame)))


def test_each_end_proves_that_it_knows_the_key_of_its_role_and_name() -> None:
    connecting, accepting = Connecting(HOST), Accepting(SECRET)
    assert len(connecting.hello) == HELLO_BYTES
    proof, keys = connecting.answer(accepting.challenge(connecting.hello))
    assert accepting.accept(proof) == keys
    assert (accepting.role, accepting.name) == (Role.HOST, "left/0/e1")
    with pytest.raises(Unavailable, match="'left/0/e1' has not proved"):
        accepting.accept(bytes(len(proof)))
    with pytest.raises(Unavailable, match="does not know the cluster's secret"):
        connecting.answer(Accepting(b"t" * 32).challenge(connecting.hello))
    for hello in (
        bytes(HELLO_BYTES),
        connecting.hello[:-1] + b"x",
        connecting.hello.replace(b"CTL2", b"CTL1"),
    ):
        with pytest.raises(Unavailable, match="does not speak"):
            Accepting(SECRET).challenge(hello)
    with pytest.raises(InvalidInput, match="1 to 255 bytes"):
        issue(SECRET, Role.HOST, "x" * 256)


def test_keys_are_of_one_role_and_one_name_and_not_of_the_secret() -> None:
    held = [
        HOST.key,
        PROGRAM.key,
        issue(SECRET, Role.PROGRAM, HOST.name).key,
        issue(SECRET, Role.HOST, PROGRAM.name).key,
        issue(SECRET, Role.PROGRAM, "two").key,
        key_between_hosts(SECRET),
        SECRET,
    ]
    assert len(set(held)) == len(held)
    assert HOST.key.hex() not in repr(HOST)


@pytest.mark.parametrize(
    "forged",
    [
        Credential(Role.HOST, HOST.name, PROGRAM.key),
        Credential(Role.PROGRAM, "two", PROGRAM.key),
        issue(PROGRAM.key, Role.HOST, HOST.name),
        issue(key_between_hosts(SECRET), Role.HOST, HOST.name),
    ],
)
def test_a_program_cannot_be_a_host_or_another_program(
    loop: Loop, listener: Listener, forged: Credential
) -> None:
    listener.expect("two", lambda end: None)
    with pytest.raises(Unavailable, match="does not know the cluster's secret"):
        Connector(listener.address, forged)
    # Nor where it does not ask the listener for a proof.
    connecting, (host, _, port) = Connecting(forged), listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as opened:
        opened.sendall(connecting.hello)
        assert len(opened.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        opened.sendall(bytes(PROOF_BYTES))
        with contextlib.suppress(ConnectionResetError):
            assert opened.recv(1) == b""
    with pytest.raises(Unavailable, match="has no connection"):
        listener.end(HOST.name)


def test_a_recorded_handshake_is_worth_nothing(loop: Loop, listener: Listener) -> None:
    connecting, (host, _, port) = Connecting(HOST), listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as opened:
        opened.sendall(connecting.hello)
        proof, keys = connecting.answer(opened.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
        opened.sendall(proof)
        assert opened.recv(1), "it has been let in"
        heard = Heard(loop, listener, HOST.name)
    assert heard.next() is None
    with socket.create_connection((host, int(port)), WAIT_S) as opened:
        opened.sendall(connecting.hello)
        assert len(opened.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        opened.sendall(proof + Sealer(keys.to_listener).seal(b"begin"))
        with contextlib.suppress(ConnectionResetError):
            assert opened.recv(1) == b""
    with pytest.raises(Unavailable, match="has no connection"):
        listener.end(HOST.name)


def test_frames_go_both_ways_in_order_until_the_end(loop: Loop, listener: Listener) -> None:
    connector = Connector(listener.address, HOST)
    connector.send(b"early")
    heard = Heard(loop, listener, "left/0/e1")
    large = bytes(range(256)) * 40_000
    for body in (b"one", b"", large):
        connector.send(body)
        heard.send(body)
    assert [heard.next() for _ in range(4)] == [b"early", b"one", b"", large]
    assert [connector.receive() for _ in range(3)] == [b"one", b"", large]
    connector.close()
    assert heard.next() is None
    with pytest.raises(Unavailable, match="is lost"):
        connector.send(b"late")
    with pytest.raises(Unavailable, match="'left/0/e1' has no connection"):
        listener.end("left/0/e1")


def test_nobody_takes_a_name_whose_holder_lives(loop: Loop, listener: Listener) -> None:
    first = Connector(listener.address, HOST)
    heard = Heard(loop, listener, HOST.name)
    with pytest.raises(Unavailable, match="has refused 'left/0/e1'"):
        Connector(listener.address, HOST)
    first.send(b"here")
    assert heard.next() == b"here"
    first.close()
    assert heard.next() is None
    Connector(listener.address, HOST).close()


def test_a_program_is_let_in_once_and_when_it_is_expected(loop: Loop, listener: Listener) -> None:
    ends: asyncio.Queue[End] = asyncio.Queue()
    with pytest.raises(Unavailable, match="has refused 'one'"):
        Connector(listener.address, PROGRAM)
    listener.expect("one", ends.put_nowait)
    first = Connector(listener.address, PROGRAM)
    end = loop.run(asyncio.wait_for(ends.get(), WAIT_S))
    with pytest.raises(Unavailable, match="has no connection"):
        listener.end("one")  # it is no host
    first.close()
    lost = threading.Event()

    async def attend() -> None:
        end.attend(lambda body: None, lost.set)

    loop.run(attend())
    assert lost.wait(WAIT_S)
    with pytest.raises(Unavailable, match="has refused 'one'"):
        Connector(listener.address, PROGRAM)


def test_strangers_are_not_listened_to(loop: Loop, listener: Listener) -> None:
    with pytest.raises(Unavailable):
        Connector(listener.address, issue(b"t" * 32, Role.HOST, "left/0/e1"))
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as stranger:
        stranger.sendall(b"x" * HELLO_BYTES)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    with pytest.raises(Unavailable, match="has no connection"):
        listener.end("left/0/e1")
    with pytest.raises(Unavailable, match="cannot be reached"):
        Connector("127.0.0.1:1", HOST)


def test_strangers_who_stay_keep_nobody_out(
    loop: Loop, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_MOST_UNPROVEN", 8)
    host, _, port = listener.address.rpartition(":")
    with contextlib.ExitStack() as undo:
        strangers = [
            undo.enter_context(socket.create_connection((host, int(port)), WAIT_S)) for _ in range(40)
        ]
        connector = Connector(listener.address, HOST)
        undo.callback(connector.close)
        connector.send(b"here")
        assert Heard(loop, listener, HOST.name).next() == b"here"
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""  # it has made room
