"""The controller's end of all connections of control, in its event loop.

Who connects has a short time to prove itself, and until then only TLS looks at what it says, and at one
message of fixed length inside (`_native.PeerChannel`); nothing of it is unpickled. While the connection of a
name lives, nobody else gets that name, and a program is let in only when the controller expects it. Who is
turned away is told why, and so is the log. Failures: a connection that is lost, or on which something comes
that was not sent, ends, and whoever has it is told; what it was told before may not have been read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

from waystation import _native
from waystation._errors import Corrupt, Unavailable, WaystationError
from waystation._peers import TurnedAway, ends_of
from waystation.runtime.control.credentials import CONTROLLER, MOST_BYTES, RUN, Role

_PROVE_S = 60.0
_MOST_UNPROVEN = 1024


class Listener:
    """Listens; made by `start`.

    Attributes:
        address: `IP:PORT`.
        keys: What it proves itself by.
        tell: Takes lines for the log.
        turned_away: Is told of those who are.
    """

    def __init__(self, secret: bytes, tell: Callable[[str], None]) -> None:
        self.address = ""
        self.keys: _native.PeerKeys = _native.PeerKeys.of_issuer(secret)
        self.tell = tell
        self.turned_away: TurnedAway = TurnedAway(tell)
        self._ends: dict[tuple[Role, str], End] = {}
        self._unproven: dict[End, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None
        self._expected: dict[str, Callable[[End], None]] = {}  # programs

    @classmethod
    async def start(
        cls, host: str, secret: bytes, tell: Callable[[str], None] = lambda line: None
    ) -> Listener:
        """Begins to listen.

        Args:
            host: The address of this machine at which others reach it.
            secret: Of the cluster, from which all credentials are made.
            tell: Takes lines for the log: of clients that are turned away, and of connections that it ends.
        """
        found = cls(secret, tell)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: End(found), host, 0)
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
            oldest.give_up("it has not proved itself, and others have come")

    def why_not(self, role: str, name: str) -> str | None:
        """Why somebody who has proved itself is not let in; None if it is."""
        if role not in set(Role):
            return f"'{name}' is neither a host nor a program"
        if (Role(role), name) in self._ends:
            return f"'{name}' is connected already"
        if role == Role.PROGRAM and name not in self._expected:
            return f"nobody expects program '{name}'"
        return None

    def let_in(self, end: End, role: Role) -> None:
        """It has proved itself, and knows that it is let in."""
        self._unproven.pop(end, None)
        self._ends[role, end.name] = end
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

    Attributes:
        name: What the other end is known by.
    """

    def __init__(self, listener: Listener) -> None:
        self.name: str = ""
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._address = "an unknown address"
        self._channel: _native.PeerChannel | None = None
        self._is_open = self._is_turned_away = False
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._early: list[bytes] = []
        self._is_lost = False

    def attend(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        """Says who is told of messages, and of the end; both are called in the event loop, later."""
        self._on_frame, self._on_lost = on_frame, on_lost
        asyncio.get_running_loop().call_soon(self._pass_on_early)

    def send(self, body: bytes) -> None:
        """Sends a message; waits for nothing. After the end nothing happens."""
        if self._transport is not None and self._is_open and not self._transport.is_closing():
            assert self._channel is not None, "it is open"
            self._transport.write(self._channel.seal(body))

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
        self._is_turned_away = True  # of which nobody needs to be told
        if self._transport is not None:
            self._transport.abort()

    def turn_away(self, why: object) -> None:
        """Ends it before it was let in; what there is to say still reaches the other end, if it reads it.

        It is kept, for as long as it may take to prove oneself, until the other end has closed it: it would
        lose what was said if this end closed it while something comes that was not read.
        """
        self._note(why)
        assert self._transport is not None, "it is connected"
        assert self._channel is not None, "something has come on it"
        if not self._transport.is_closing():
            self._transport.write(self._channel.take())
            self._transport.write_eof()

    def give_up(self, why: str) -> None:
        """Ends it at once if it was not let in."""
        if not self._is_open:
            self._note(why)
            self.close()

    # ---- what the event loop calls --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            ends = ends_of(opened)
        except OSError:  # it has gone
            self.close()
            return
        self._address = ends[1]
        self._channel = self._listener.keys.accept(CONTROLLER, RUN, ends, MOST_BYTES)
        self._listener.made(self)
        asyncio.get_running_loop().call_later(
            _PROVE_S, self.give_up, f"it has not proved itself in {_PROVE_S:g} s"
        )

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._channel is None or self._is_turned_away:
            return
        try:
            bodies = self._channel.feed(data)
            if not self._is_open:
                bodies = self._prove(self._channel)
        except WaystationError as error:
            if self._is_open:
                self._end(error)
            else:
                self.turn_away(error)
            return
        try:
            for body in bodies:
                self._pass_on(body)
        except (Corrupt, Unavailable) as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        del error
        self._is_lost = True
        self._listener.lost(self)
        if not self._is_open:
            self._note("it has ended the connection before it had proved itself")
        if self._on_lost is not None:
            self._on_lost()

    def _prove(self, channel: _native.PeerChannel) -> list[bytes]:
        """Goes on with the proofs; returns what has come after them."""
        assert self._transport is not None
        asked = channel.asked
        if asked is None:
            self._transport.write(channel.take())
            return []
        role, name = asked
        why_not = self._listener.why_not(role, name)
        channel.admit(why_not is None)
        if why_not is not None:
            self.turn_away(why_not)
            return []
        self.name, self._is_open = name, True
        self._listener.let_in(self, Role(role))
        self._transport.write(channel.take())  # whoever reads it is in
        return channel.feed(b"")

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
        except Corrupt as error:
            self._end(error)
        except Exception:
            self.close()
            raise  # the event loop logs it, as it does of what comes later
        if self._is_lost and self._on_lost is not None:
            self._on_lost()

    def _end(self, error: WaystationError) -> None:
        """Ends it for what has come from whoever has proved itself."""
        self._listener.tell(f"the connection of '{self.name}' is ended: {error}")
        self.close()

    def _note(self, why: object) -> None:
        if not self._is_turned_away:
            self._is_turned_away = True
            self._listener.turned_away.note(self._address, why)
