"""Clusters at which nobody listens: that is said at once, without Ray."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from waystation.errors import Unavailable
from waystation.runtime import connect
from waystation.runtime.cluster import look, probing
from waystation.runtime.cluster.probing import require_listener

HERE = "127.0.0.2"


@pytest.fixture(name="listener")
def made_listener() -> Iterator[socket.socket]:
    with socket.create_server((HERE, 0)) as listener:
        yield listener


def closed_port() -> int:
    with socket.create_server((HERE, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_a_listener_is_found(listener: socket.socket) -> None:
    require_listener(f"{HERE}:{listener.getsockname()[1]}")


def test_where_nobody_listens_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"{HERE}:{closed_port()}"
    told = f"there is no Ray cluster at '{address}': nothing listens there"
    with pytest.raises(Unavailable, match=told):
        require_listener(address)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(Unavailable, match=told):
        require_listener("auto")


def test_a_machine_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def connecting(address: tuple[str, int], timeout_s: float) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(probing.socket, "create_connection", connecting)
    with pytest.raises(Unavailable, match=r"nothing listens there \(no answer in 5 s\)"):
        require_listener("192.0.2.1:6379")


def test_the_address_of_this_machine_is_asked_as_ray_takes_it(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    monkeypatch.setattr(probing, "_own_address", lambda: HERE)
    for host in ("127.0.0.1", "localhost"):
        require_listener(f"{host}:{listener.getsockname()[1]}")
        port = closed_port()
        with pytest.raises(Unavailable, match=rf"'{host}:{port}' \({HERE}:{port}: Ray takes '{host}' for"):
            require_listener(f"{host}:{port}")


@pytest.mark.parametrize("address", ["auto", "here", "ray://here:10001", "here:", ":6379"])
def test_what_is_no_address_of_a_port_is_left_to_ray(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    require_listener(address)


def test_programs_and_commands_ask_first() -> None:
    pytest.importorskip("ray")
    address = f"{HERE}:{closed_port()}"
    for ask in (connect, look):
        with pytest.raises(Unavailable, match="nothing listens there"):
            ask(address)
