"""The end of a connection that a host or a program has: sockets and threads, no event loop.

Failures: the controller cannot be reached, or does not know the key (`Unavailable`, at once); the
connection is lost (whoever receives gets None, whoever sends an error); what comes is not what was sent,
which counts as lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from waystation import _forks
from waystation._errors import Corrupt, Unavailable
from waystation.runtime.control.frames import Opener, Sealer
from waystation.runtime.control.handshake import CHALLENGE_BYTES, Connecting, Credential, Keys

_TIMEOUT_S = 60.0
_RECEIVE_BYTES = 1 << 18


class Connector:
    """A connection to the controller.

    Args:
        address: `IP:PORT` of the controller's listener.
        credential: What this end proves itself by.

    Raises:
        Unavailable: The controller cannot be reached, or has not proved itself.
    """

    def __init__(self, address: str, credential: Credential) -> None:
        host, _, port = address.rpartition(":")
        connecting = Connecting(credential)
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S)
        except OSError as error:
            raise Unavailable(f"the controller at {address} cannot be reached: {error}") from error
        try:
            keys = self._prove(connecting)
        except OSError as error:  # Unavailable is one
            self._socket.close()
            raise Unavailable(f"there is no connection to the controller at {address}: {error}") from error
        self._lock = threading.Lock()
        self._sealer = Sealer(keys.to_listener)
        self._opener = Opener(keys.to_connector)
        self._received = self._receive()
        if self.receive() is None:  # an empty frame: the proof was right
            raise Unavailable(f"the controller at {address} has refused '{credential.name}'")
        self._socket.settimeout(None)
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: gives up the copy of the socket, and leaves the connection alone.

        Whoever is at the other end hears of the parent's end then, and not only of that of its last child.
        """
        self._socket.close()
        self._lock = threading.Lock()

    def send(self, body: bytes) -> None:
        """Sends a frame; waits until the system has taken it.

        Raises:
            Unavailable: The connection is lost.
        """
        with self._lock:
            try:
                self._socket.sendall(self._sealer.seal(body))
            except OSError as error:
                raise Unavailable(f"the connection to the controller is lost: {error}") from error

    def receive(self) -> bytes | None:
        """Waits for a frame; only one thread may. None when the connection has ended."""
        return next(self._received, None)

    def close(self) -> None:
        """Ends it; whoever receives is told."""
        with contextlib.suppress(OSError):  # it may have ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _prove(self, connecting: Connecting) -> Keys:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(connecting.hello)
        proof, keys = connecting.answer(self._exactly(CHALLENGE_BYTES))
        self._socket.sendall(proof)
        return keys

    def _receive(self) -> Iterator[bytes]:
        try:
            while received := self._socket.recv(_RECEIVE_BYTES):
                yield from self._opener.feed(received)
        except (OSError, Corrupt):
            pass
        self.close()

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            received = self._socket.recv(count - len(found))
            if not received:
                raise ConnectionError("it has ended the connection")
            found += received
        return found
