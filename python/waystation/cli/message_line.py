"""Messages between launches: lines of JSON over TCP, without blocking.

Invariants: nothing blocks; whoever is not heard for `SILENCE_S` is lost; a message longer than `MOST_BYTES`,
or that is no object, ends the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

SILENCE_S = 15.0
BEAT_S = 2.0
MOST_BYTES = 1 << 16


class MessageLine:
    """One connection.

    Args:
        selector: Has it while it is open.
        connection: It.
        on_message: Takes each message but signs of life.
        on_lost: Called once, when the other side has gone; not by `close`.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector, self._connection = selector, connection
        self._on_message, self._on_lost = on_message, on_lost
        self._received = b""
        self._heard_s = self._sent_s = time.monotonic()
        self._is_open = True
        selector.register(connection, selectors.EVENT_READ, self._read)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; what cannot be sent at once is as good as lost, and so is the connection."""
        if not self._is_open:
            return
        self._sent_s = time.monotonic()
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._lose()

    def tick(self, now_s: float) -> None:
        """Shows that this side is there, and looks whether the other is."""
        if self._is_open and now_s >= self._heard_s + SILENCE_S:
            self._lose()
        elif now_s >= self._sent_s + BEAT_S:
            self.send({})

    def end_sending(self) -> None:
        """Nothing more is sent, but what the other side says is still taken."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends it; idempotent."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._connection)
            self._connection.close()

    def _lose(self) -> None:
        if self._is_open:
            self.close()
            self._on_lost()

    def _read(self) -> None:
        try:
            data = self._connection.recv(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._heard_s = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._take(line)
        if not data or len(self._received) > MOST_BYTES:
            self._lose()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._lose()
        elif message and self._is_open:
            self._on_message(message)


def proof_of(secret: bytes, *said: str) -> str:
    """What shows that a side knows the secret, of what both have said."""
    return hmac.new(secret, "\0".join(said).encode(), hashlib.sha256).hexdigest()
