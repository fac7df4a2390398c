"""The controller's end of all connections of control, in its event loop.

Who connects has a short time to prove itself, and until then can have only a hello and a proof of fixed
lengths read; nothing of what it says is unpickled. While the connection of a name lives, nobody else gets
that name, and a program is let in only when the controller expects it. Failures: a connection that is lost,
or on which something comes that was not sent, ends, and whoever has it is told; what it was told before may
not have been read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

from waystation._errors import Corrupt, Unavailable
from waystation.runtime.control.frames import Opener, Sealer
from waystation.runtime.control.handshake import HELLO_BYTES, PROOF_BYTES, Accepting, Role

_PROVE_S = 60.0
_MOST_UNPROVEN = 1024


class Listener:
    """Listens; made by `start`.

    Attributes:
        address: `IP:PORT`.
    """

    def __init__(self, secret: bytes) -> None:
        self.address = ""
        self._secret = secret
        self._ends: dict[tuple[Role, str], End] = {}
        self._unproven: dict[End, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None
        self._expected: dict[str, Callable[[End], None]] = {}  # programs

    @classmethod
    async def start(cls, host: str, secret: bytes) -> Listener:
        """Begins to listen.

        Args:
            host: The address of this machine at which others reach it.
            secret: Of the cluster, from which all credentials are derived.
        """
        found = cls(secret)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: End(found, secret), host, 0)
        found._server = server
        name = server.sockets[0].getsockname()
        found.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        return found

    async def close(self) -> None:
        """Ends all connections."""
        if self._server is not None:
            self._server.close()
        for end in [*self._ends.values(), *self._unproven]:
            end.close()

    def end(self, name: str) -> End:
        """The connection of a host.

        Raises:
            Unavailable: There is none.
        """
        found = self._ends.get((Role.HOST, name))
        if found is None:
            raise Unavailable(f"'{name}' has no connection to the controller")
        return found

    def expect(self, name: str, then: Callable[[End], None]) -> None:
        """Lets a program in, once, and has `then` called with its connection."""
        self._expected[name] = then

    def made(self, end: End) -> None:
        """Somebody has connected, whoever it is; where there are too many, the oldest makes room.

        To prove itself takes a moment, so strangers who stay do not keep out those who come.
        """
        self._unproven[end] = None
        if len(self._unproven) > _MOST_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]  # now: it is told of its end later
            oldest.close()

    def proven(self, end: End, role: Role) -> None:
        """It has proved itself.

        Raises:
            Unavailable: It is refused all the same.
        """
        place = role, end.name
        if place in self._ends:
            raise Unavailable(f"'{end.name}' is connected already")
        if role is Role.PROGRAM and end.name not in self._expected:
            raise Unavailable(f"nobody expects program '{end.name}'")
        self._unproven.pop(end, None)
        self._ends[place] = end
        if role is Role.PROGRAM:
            self._expected.pop(end.name)(end)

    def lost(self, end: End) -> None:
        """It has ended."""
        self._unproven.pop(end, None)
        for place in [place for place, known in self._ends.items() if known is end]:
            del self._ends[place]


class End(asyncio.Protocol):
    """One connection.

    Args:
        listener: Whose it is.
        secret: Of the cluster.

    Attributes:
        name: What the other end is known by.
    """

    def __init__(self, listener: Listener, secret: bytes) -> None:
        self.name = ""
        self._listener = listener
        self._accepting: Accepting | None = Accepting(secret)
        self._challenged = False
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._sealer: Sealer | None = None
        self._opener: Opener | None = None
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._early: list[bytes] = []
        self._is_lost = False

    def attend(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        """Says who is told of frames, and of the end; both are called in the event loop, later."""
        self._on_frame, self._on_lost = on_frame, on_lost
        asyncio.get_running_loop().call_soon(self._pass_on_early)

    def send(self, body: bytes) -> None:
        """Sends a frame; waits for nothing. After the end nothing happens."""
        if self._transport is not None and self._sealer is not None and not self._transport.is_closing():
            self._transport.write(self._sealer.seal(body))

    def pause(self, is_paused: bool) -> None:
        """Reads nothing for now, or goes on to."""
        if self._transport is None or self._transport.is_closing():
            return
        with contextlib.suppress(RuntimeError):  # it is so already
            if is_paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def close(self) -> None:
        """Ends it at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- what the event loop calls --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._listener.made(self)
        asyncio.get_running_loop().call_later(_PROVE_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            if self._opener is None:
                data = self._prove(data)
            if self._opener is not None and data:
                for body in self._opener.feed(data):
                    self._pass_on(body)
        except (Corrupt, Unavailable):
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        del error
        self._is_lost = True
        self._listener.lost(self)
        if self._on_lost is not None:
            self._on_lost()

    def _prove(self, data: bytes) -> bytes:
        """Takes the handshake; returns what comes after it."""
        assert self._transport is not None
        assert self._accepting is not None
        self._buffer += data
        if not self._challenged and len(self._buffer) >= HELLO_BYTES:
            hello, self._buffer = self._buffer[:HELLO_BYTES], self._buffer[HELLO_BYTES:]
            self._transport.write(self._accepting.challenge(hello))
            self._challenged = True
        if not self._challenged or len(self._buffer) < PROOF_BYTES:
            return b""
        proof, rest = self._buffer[:PROOF_BYTES], self._buffer[PROOF_BYTES:]
        keys, role = self._accepting.accept(proof), self._accepting.role
        assert role is not None, "it has been accepted"
        self.name, self._buffer, self._accepting = self._accepting.name, b"", None
        self._sealer = Sealer(keys.to_connector)
        self._listener.proven(self, role)
        self._opener = Opener(keys.to_listener)
        self.send(b"")
        return rest

    def _pass_on(self, body: bytes) -> None:
        if self._on_frame is None or self._early:
            self._early.append(body)
        else:
            self._on_frame(body)

    def _pass_on_early(self) -> None:
        early, self._early = self._early, []
        try:
            for body in early:
                assert self._on_frame is not None
                self._on_frame(body)
        except Exception as error:
            self.close()
            if not isinstance(error, Corrupt):
                raise  # the event loop logs it, as it does of what comes later
        if self._is_lost and self._on_lost is not None:
            self._on_lost()

    def _give_up(self) -> None:
        if self._opener is None:
            self.close()
