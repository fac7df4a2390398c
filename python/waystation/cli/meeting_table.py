"""The table at which launches meet: who is there, who is ready, and when a round begins and ends.

It knows no processes: members say what became of theirs. Invariants: a round begins when every member is
ready, which it says only when nothing of it runs any more; whatever a member says or does in a round that is
over is no failure of the next; whoever comes again under the name of a member takes its seat, and ends the
round that that one was in.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from waystation._errors import Conflict, InvalidInput
from waystation.cli.message_line import MessageLine, proof_of


@dataclass
class _Guest:
    """A connection, the member that has proven to be at its other end, and what that has last said."""

    line: MessageLine
    nonce: str
    name: str = ""
    state: str = "there"


class Table:
    """See the module.

    Args:
        selector: Has its connections.
        names: The members.
        address: Where it listens.
        secret: What members know; empty if there is none.

    Raises:
        Conflict: The address is taken.
        InvalidInput: It is no address of this host.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        names: Sequence[str],
        address: tuple[str, int],
        secret: bytes,
    ) -> None:
        self._selector, self._names, self._secret = selector, list(names), secret
        self._guests: list[_Guest] = []
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
        self._listener.listen(len(names))
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        for guest in list(self._guests):
            guest.line.tick(now_s)

    def has_others(self, name: str) -> bool:
        """Whether anybody but this member is still there."""
        return any(guest.name != name for guest in self._guests)

    def close(self) -> None:
        """Takes no one else, and says nothing more."""
        self._is_closed = True
        self._selector.unregister(self._listener)
        self._listener.close()
        for guest in self._guests:
            guest.line.end_sending()

    def end(self) -> None:
        """Closes the connections that others have not."""
        for guest in self._guests:
            guest.line.close()
        self._guests.clear()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        nonce = secrets.token_hex(16)
        guest = _Guest(
            MessageLine(
                self._selector,
                connection,
                lambda message: self._heard(guest, message),
                lambda: self._lost(guest),
            ),
            nonce,
        )
        self._guests.append(guest)
        guest.line.send({"challenge": nonce})

    def _heard(self, guest: _Guest, message: dict[str, Any]) -> None:
        match message:
            case {"join": str(name), "nonce": str(nonce), "proof": str(proof)} if not guest.name:
                self._seat(guest, name, nonce, proof)
            case {"say": "left", "why": str(why)} if guest.name:
                self._tell_all({"say": "left", "why": f"host '{guest.name}': {why}"})
            case {"say": "failed", "why": str(why)} if guest.name:
                guest.state = "failed"
                self._end_round(f"host '{guest.name}': {why}")
            case {"say": "ready" | "ended" as state} if guest.name:
                guest.state = state
                self._go_on()

    def _seat(self, guest: _Guest, name: str, nonce: str, proof: str) -> None:
        said = guest.nonce, nonce, name, *self._names
        if not hmac.compare_digest(proof, proof_of(self._secret, "member", *said)):
            guest.line.send({"refused": "it has another secret, or another list of hosts"})
            return
        if name not in self._names:
            guest.line.send({"refused": f"it has no host '{name}'"})
            return
        for other in [other for other in self._guests if other.name == name]:
            other.line.close()
            self._lost(other)
        guest.name = name
        guest.line.send({"welcome": proof_of(self._secret, "table", *said)})
        self._go_on()

    def _lost(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        if guest.name:
            self._end_round(f"the launch of host '{guest.name}' has gone")
            self._go_on()

    def _end_round(self, why: str) -> None:
        if self._is_running:
            self._is_running = False
            self._tell_all({"say": "stop", "why": why})

    def _go_on(self) -> None:
        """Begins a round when all are ready, and ends it when all have ended."""
        if self._is_closed:
            return
        states = {guest.name: guest.state for guest in self._guests if guest.name}
        if self._is_running:
            if "ready" in states.values():  # of one that has ended the round by itself
                self._end_round("a host has begun anew")
            elif len(states) == len(self._names) and set(states.values()) == {"ended"}:
                self._is_running = False
                self._tell_all({"say": "done"})
            return
        missing = [name for name in self._names if states.get(name) != "ready"]
        if missing:
            self._tell_all({"missing": missing})
            return
        self._is_running = True
        for guest in self._guests:
            guest.state = "running"
        self._tell_all({"say": "start"})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for guest in [guest for guest in self._guests if guest.name]:
            guest.line.send(message)
