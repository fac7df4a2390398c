"""The end of a connection that a host or a program has: sockets and threads, no event loop.

Failures: the controller cannot be reached, does not prove itself in time, or does not let this end in
(`Unavailable`); the connection is lost (whoever receives gets None, whoever sends an error); what comes is
not what was sent, which counts as lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from waystation import _forks, _native
from waystation._errors import Unavailable, WaystationError
from waystation._peers import ends_of
from waystation.runtime.control.credentials import CONTROLLER, MOST_BYTES, RUN, Credential

_TIMEOUT_S = 60.0
_RECEIVE_BYTES = 1 << 18


class Connector:
    """A connection to the controller.

    Args:
        address: `IP:PORT` of the controller's listener.
        credential: What this end proves itself by.

    Raises:
        Unavailable: The controller cannot be reached, has not proved itself, or does not let this end in.
    """

    def __init__(self, address: str, credential: Credential) -> None:
        host, _, port = address.rpartition(":")
        until_s = time.monotonic() + _TIMEOUT_S
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S)
        except OSError as error:
            raise Unavailable(f"the controller at {address} cannot be reached: {error}") from error
        try:
            early = self._prove(credential, until_s)
        except (OSError, WaystationError) as error:
            self._socket.close()
            raise Unavailable(
                f"'{credential.name}' has no connection to the controller at {address}: {error}"
            ) from error
        self._lock = threading.Lock()
        self._received = self._receive(early)
        self._socket.settimeout(None)
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: gives up the copy of the socket, and leaves the connection alone.

        Whoever is at the other end hears of the parent's end then, and not only of that of its last child.
        """
        self._socket.close()
        self._lock = threading.Lock()

    def send(self, body: bytes) -> None:
        """Sends a message; waits until the system has taken it.

        Raises:
            Unavailable: The connection is lost.
        """
        with self._lock:
            try:
                self._socket.sendall(self._channel.seal(body))
            except (OSError, WaystationError) as error:
                raise Unavailable(f"the connection to the controller is lost: {error}") from error

    def receive(self) -> bytes | None:
        """Waits for a message; only one thread may. None when the connection has ended."""
        return next(self._received, None)

    def close(self) -> None:
        """Ends it; whoever receives is told."""
        with contextlib.suppress(OSError):  # it may have ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _prove(self, credential: Credential, until_s: float) -> list[bytes]:
        """Has both ends prove themselves; returns what the controller has said since."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keys = _native.PeerKeys.of_issued(credential.key, credential.controller)
        self._channel = channel = keys.connect(
            credential.role, credential.name, CONTROLLER, RUN, ends_of(self._socket), MOST_BYTES
        )
        early: list[bytes] = []
        while not channel.is_open:
            self._socket.sendall(channel.take())
            self._socket.settimeout(max(until_s - time.monotonic(), 0.001))
            received = self._socket.recv(_RECEIVE_BYTES)
            if not received:
                raise ConnectionError("it has ended the connection")
            try:
                early = channel.feed(received)
            except WaystationError:
                self._socket.sendall(channel.take())  # why
                raise
        return early

    def _receive(self, early: list[bytes]) -> Iterator[bytes]:
        yield from early
        try:
            while received := self._socket.recv(_RECEIVE_BYTES):
                yield from self._channel.feed(received)
        except (OSError, WaystationError):
            pass
        self.close()
