"""How launches of one program on several hosts start it together, and end it together when one of them fails.

Each launch is a *member*. The launch of the first host also runs the *server*, to which all of them connect.
A *run* is one start of the program everywhere. It begins when every member is ready. It is over when all
processes have ended well on all hosts, and then the program is over too; or when a member fails, ends or
falls silent, and then every member ends its processes and is ready for the next run, as often as `--restarts`
allows.

What can go wrong, in order: a host does not join in time (Unavailable); a member fails, or its launch is
killed (the others end the run, and wait for it to start again); the first host's launch is killed or cannot
be reached (each member ends the run by itself: nobody continues alone); a member does not start again (all
end). Invariants: no member lets processes of a run continue after it has heard that the run is over, or has
heard nothing for `SILENCE_S`; a run begins only when no member runs anything of an earlier one.

Both sides prove that they know the secret of the job, by TLS 1.3 (`_native.PeerChannel`), before anything is
said; without a secret, that they are launches of the same hosts. Messages are JSON. Nothing blocks. A message
longer than `MOST_BYTES`, or that is not an object, ends the connection. Strangers who connect and say nothing
are cut off after `SILENCE_S`, and sooner where there are many of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from waystation import _native
from waystation._errors import Conflict, InvalidInput, Unavailable, WaystationError
from waystation._peers import TurnedAway, ends_of

Tell: TypeAlias = Callable[[str], None]

SILENCE_S = 15.0  # after which a connection counts as lost
BEAT_S = 2.0
MOST_BYTES = 1 << 20
_RECEIVE_BYTES = 1 << 16
_MOST_TOLD = 4096  # characters of why something ended
_CONNECT_AGAIN_S = 0.2
_MOST_UNPROVEN = 64
_NO_SECRET = b"launches without a secret"  # which everybody knows
_LAST_WORDS_S = 5.0  # for which the server stays, so that all hear what was said last


class Rendezvous:
    """The launch of this host among those of all.

    Args:
        names: The names of all hosts; the first runs the server.
        host: The name of this host.
        address: The address of the server.
        secret: The secret that all launches share; empty if they share none.
        patience_s: How long to wait for the others to be ready.
        tell: Takes what people should know.

    Attributes:
        stopped: Why another host ended the run; None if none did.
        left: Why there is no further run; None while there may be one.

    Raises:
        Conflict: The address of the server is taken.
        InvalidInput: It is not an address of this host.
    """

    def __init__(
        self,
        names: Sequence[str],
        host: str,
        address: tuple[str, int],
        secret: bytes,
        patience_s: float,
        tell: Tell,
    ) -> None:
        self._names, self._host, self._address = list(names), host, address
        self._keys = _native.PeerKeys.of_launches(secret or _NO_SECRET)
        self._patience_s, self._tell = patience_s, tell
        self._selector = selectors.DefaultSelector()
        self._connection: Connection | None = None
        self._tried_s = -_CONNECT_AGAIN_S
        self._is_ready = self._is_running = self._is_over = False
        self._refused: str | None = None
        self._others_missing: list[str] = []
        self.stopped: str | None = None
        self.left: str | None = None
        self._server: RendezvousServer | None = None
        if host == names[0]:
            self._server = RendezvousServer(self._selector, names, address, self._keys, tell)

    def fileno(self) -> int:
        """What is readable when `handle` has something to do."""
        epoll: int = self._selector.fileno()
        return epoll

    def handle(self, timeout_s: float = 0.0) -> None:
        """Takes what others have said; to be called every second at least."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now_s = time.monotonic()
        if self._server is not None:
            self._server.tick(now_s)
        if self._connection is not None:
            self._connection.tick(now_s)
        elif not self._is_running and self._refused is None and now_s >= self._tried_s + _CONNECT_AGAIN_S:
            self._tried_s = now_s
            self._connect()

    # ---- runs ----------------------------------------------------------------------------------

    def join(self) -> bool:
        """Waits until the launches of all hosts are ready; returns whether they are, and will be: `left` says
        why not.

        Raises:
            Unavailable: They were not in time.
            Conflict: The first host's launch is of another program, or has another secret.
        """
        self.stopped, self._is_over, self._is_ready = None, False, True
        self._say("ready")
        until, told_s = time.monotonic() + self._patience_s, time.monotonic() + 2
        while not self._is_running and self.left is None:
            self.handle(_CONNECT_AGAIN_S)
            if self._refused is not None:
                raise Conflict(
                    f"the launches of hosts '{self._names[0]}' and '{self._host}' do not belong together: "
                    f"{self._refused}; start them with the same --secret-file and --hosts"
                )
            if time.monotonic() >= told_s:
                self._tell(f"waiting for {self._missing()}")
                told_s = float("inf")
            if time.monotonic() >= until:
                raise Unavailable(
                    f"the launches of all hosts have not come together within {self._patience_s:g} s: "
                    f"{self._missing()}; start them on every host, with the same --hosts and --port"
                )
        self._is_ready = False
        return self.left is None

    def fails(self, why: str) -> None:
        """This member's processes do not go on: nobody's do."""
        if self._is_running:
            self._is_running = False
            self._say("failed", why)

    def ends_well(self) -> bool:
        """This member's processes have ended well; waits until all have, or the run is over otherwise."""
        if self.stopped is None:
            self._say("ended")
        while not self._is_over and self.stopped is None and self.left is None:
            self.handle(_CONNECT_AGAIN_S)
        self._is_running = False
        return self._is_over

    def leave(self, why: str) -> None:
        """There will be no other run, for anybody."""
        self._say("left", why)
        until = time.monotonic() + _LAST_WORDS_S
        while self.left is None and self._connection is not None and time.monotonic() < until:
            self.handle(_CONNECT_AGAIN_S)

    def close(self) -> None:
        """Ends the connections, once everybody has heard what was said."""
        if self._server is not None:
            self._server.close()
            until = time.monotonic() + _LAST_WORDS_S
            while self._server.has_others(self._host) and time.monotonic() < until:
                for key, _ in self._selector.select(_CONNECT_AGAIN_S):
                    key.data()
            self._server.end()
        if self._connection is not None:
            self._connection.close()
        self._selector.close()

    # ---- the connection to the server ----------------------------------------------------------

    def _connect(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_AGAIN_S)
        try:
            connection.connect(self._address)
            ends = ends_of(connection)
        except OSError:
            connection.close()
            return
        channel = self._keys.connect(
            "launch", self._host, self._names[0], _run_of(self._names), ends, MOST_BYTES
        )
        self._connection = Connection(
            self._selector, connection, channel, self._proved, self._heard, self._lost
        )
        self._connection.begin()

    def _heard(self, message: dict[str, Any]) -> None:
        match message:
            case {"say": "start"} if self._is_ready:
                self._is_running = True
            case {"say": "stop", "why": str(why)}:
                self._stop(why)
            case {"say": "done"}:
                self._is_over = True
            case {"say": "left", "why": str(why)}:
                self.left = why
                self._stop(why)
            case {"missing": list(names)}:
                self._others_missing = [str(name) for name in names]

    def _proved(self, error: WaystationError | None) -> None:
        if error is not None:
            self._refused = error.message
        elif self._is_ready:
            self._say("ready")

    def _lost(self) -> None:
        self._connection = None
        self._stop(f"the launch of host '{self._names[0]}' cannot be reached any more")

    def _stop(self, why: str) -> None:
        if self._is_running and not self._is_over:
            self._is_running = False
            self.stopped = why

    def _say(self, what: str, why: str = "") -> None:
        if self._connection is not None:
            self._connection.send({"say": what, "why": why[:_MOST_TOLD]})

    def _missing(self) -> str:
        if self._connection is None:
            return f"host '{self._names[0]}'"
        return "host " + ", ".join(f"'{name}'" for name in self._others_missing)


class Connection:
    """Sends and receives messages over one socket, and notices when the other side is gone.

    Args:
        selector: Watches the socket while it is open.
        opened: The socket.
        channel: The proofs, and what encrypts messages.
        on_proof: Called once, when both sides have proved themselves, or with why there is no connection.
        on_message: Takes each message, except signs of life.
        on_lost: Called once, when the other side has gone; not by `close`.
        admits: Says whether whoever has proved itself may connect, by its name; of the side that listens.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        opened: socket.socket,
        channel: _native.PeerChannel,
        on_proof: Callable[[WaystationError | None], None],
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[], None],
        admits: Callable[[str], bool] = lambda name: False,
    ) -> None:
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector, self._socket, self._channel = selector, opened, channel
        self._on_proof, self._on_message, self._on_lost = on_proof, on_message, on_lost
        self._admits = admits
        self._heard_s = self._sent_s = time.monotonic()
        self._is_open, self._is_proven = True, False
        selector.register(opened, selectors.EVENT_READ, self._read)

    def begin(self) -> None:
        """The side that connects begins to prove itself."""
        self._send(self._channel.take())

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; what cannot be sent at once is as good as lost, and so is the connection."""
        if self._is_open and self._is_proven:
            self._send(self._channel.seal(json.dumps(message).encode()))

    def tick(self, now_s: float) -> None:
        """Shows that this side is there, and looks whether the other is."""
        if self._is_open and now_s >= self._heard_s + SILENCE_S:
            self._lose()
        elif now_s >= self._sent_s + BEAT_S:
            self.send({})

    def end_sending(self) -> None:
        """Nothing more is sent, but what the other side says is still taken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends it; idempotent."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._socket)
            self._socket.close()

    def _lose(self) -> None:
        if self._is_open:
            self.close()
            self._on_lost()

    def _send(self, sealed: bytes) -> None:
        self._sent_s = time.monotonic()
        try:
            self._socket.sendall(sealed)
        except OSError:
            self._lose()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        try:
            messages = self._channel.feed(data)
            if not self._is_proven:
                messages = self._prove()
        except WaystationError as error:
            if not self._is_proven:
                self._on_proof(error)
            self._send(self._channel.take())  # why
            self._lose()
            return
        if self._is_proven:  # before that, silence is the same as what proves nothing
            self._heard_s = time.monotonic()
        for message in messages:
            self._take(message)

    def _prove(self) -> list[bytes]:
        """Goes on with the proofs; returns what has been said since."""
        asked = self._channel.asked
        if asked is not None:
            purpose, name = asked
            is_expected = purpose == "launch" and self._admits(name)
            self._channel.admit(is_expected)
            if not is_expected:
                raise InvalidInput(f"there is no host '{name}' here")
        self._send(self._channel.take())
        if not (self._is_open and self._channel.is_open):
            return []
        self._is_proven = True
        self._on_proof(None)
        return self._channel.feed(b"")

    def _take(self, said: bytes) -> None:
        try:
            message = json.loads(said)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self._lose()
        elif message and self._is_open:
            self._on_message(message)


def _run_of(names: Sequence[str]) -> bytes:
    """What launches say of their hosts when they connect, so that those of other hosts do not meet."""
    return hashlib.sha256("\0".join(names).encode()).digest()[:16]


@dataclass
class _Member:
    """A connection, the member that has proved to be at its other end, and its last message."""

    address: str
    name: str = ""
    state: str = "there"
    why: str = "it has not proved itself"  # for what it is turned away
    connection: Connection = field(init=False)


class RendezvousServer:
    """Knows which members are there and which are ready, and says when a run begins and ends.

    It knows no processes: members say what became of theirs. What a member says in a run that is over does
    not fail the next one. A launch that joins under the name of a member replaces it, and ends the run that
    the earlier one was in.

    Args:
        selector: Watches its connections.
        names: The members.
        address: Where it listens.
        keys: What members prove themselves by.
        tell: Takes what people should know.

    Raises:
        Conflict: The address is taken.
        InvalidInput: It is not an address of this host.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        names: Sequence[str],
        address: tuple[str, int],
        keys: _native.PeerKeys,
        tell: Tell,
    ) -> None:
        self._selector, self._names, self._keys = selector, list(names), keys
        self._turned_away = TurnedAway(tell)
        self._members: list[_Member] = []
        self._is_running = self._is_closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
        except OSError as error:
            self._listener.close()
            what = f"the launches of all hosts cannot meet at {address[0]}:{address[1]}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                raise Conflict(f"{what}; give another --port, the same on all hosts") from error
            raise InvalidInput(f"{what}; the list of hosts begins with this one's address") from error
        self._listener.listen(len(names) + _MOST_UNPROVEN)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        for member in list(self._members):
            member.connection.tick(now_s)

    def has_others(self, name: str) -> bool:
        """Whether any other member is still there."""
        return any(member.name not in {"", name} for member in self._members)

    def close(self) -> None:
        """Takes no one else, and says nothing more."""
        self._is_closed = True
        self._selector.unregister(self._listener)
        self._listener.close()
        for member in self._members:
            member.connection.end_sending()

    def end(self) -> None:
        """Closes the connections that others have not."""
        for member in self._members:
            member.connection.close()
        self._members.clear()

    def _accept(self) -> None:
        try:
            opened, _ = self._listener.accept()
        except OSError:
            return
        try:
            ends = ends_of(opened)
        except OSError:  # it has gone
            opened.close()
            return
        member = _Member(ends[1])
        self._members.append(member)
        member.connection = Connection(
            self._selector,
            opened,
            self._keys.accept(self._names[0], _run_of(self._names), ends, MOST_BYTES),
            lambda error: self._proved(member, error),
            lambda message: self._heard(member, message),
            lambda: self._lost(member),
            lambda name: self._seat(member, name),
        )
        unproven = [each for each in self._members if not each.name]
        if len(unproven) > _MOST_UNPROVEN:  # to prove itself takes a moment: it is no launch
            unproven[0].connection.close()
            self._lost(unproven[0])

    def _heard(self, member: _Member, message: dict[str, Any]) -> None:
        match message:
            case {"say": "left", "why": str(why)}:
                self._tell_all({"say": "left", "why": f"host '{member.name}': {why}"})
            case {"say": "failed", "why": str(why)}:
                member.state = "failed"
                self._end_run(f"host '{member.name}': {why}")
            case {"say": "ready" | "ended" as state}:
                member.state = state
                self._go_on()

    def _seat(self, member: _Member, name: str) -> bool:
        """Gives a member that has proved itself its place; returns whether there is one."""
        if name not in self._names:
            return False
        for other in [other for other in self._members if other.name == name]:
            other.connection.close()
            self._lost(other)
        member.name = name
        return True

    def _proved(self, member: _Member, error: WaystationError | None) -> None:
        if error is None:
            self._go_on()
        else:
            member.why = str(error)

    def _lost(self, member: _Member) -> None:
        self._members.remove(member)
        if member.name:
            self._end_run(f"the launch of host '{member.name}' has gone")
            self._go_on()
        else:
            self._turned_away.note(member.address, member.why)

    def _end_run(self, why: str) -> None:
        if self._is_running:
            self._is_running = False
            self._tell_all({"say": "stop", "why": why})

    def _go_on(self) -> None:
        """Begins a run when all are ready, and ends it when all have ended."""
        if self._is_closed:
            return
        states = {member.name: member.state for member in self._members if member.name}
        if self._is_running:
            if "ready" in states.values():  # of one that has ended the run by itself
                self._end_run("a host has begun anew")
            elif len(states) == len(self._names) and set(states.values()) == {"ended"}:
                self._is_running = False
                self._tell_all({"say": "done"})
            return
        missing = [name for name in self._names if states.get(name) != "ready"]
        if missing:
            self._tell_all({"missing": missing})
            return
        self._is_running = True
        for member in self._members:
            member.state = "running"
        self._tell_all({"say": "start"})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for member in [member for member in self._members if member.name]:
            member.connection.send(message)
