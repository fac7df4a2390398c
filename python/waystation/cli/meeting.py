"""Launches of one program on several hosts, which start it together, and end it together when one of them
fails.

Each launch is a *member*; that of the first host has the *table*, too, to which all of them connect. A
*round* is one start of the program everywhere: it begins when every member is ready, and is over when all
processes have ended well on all hosts (then so is the program), or when a member fails, ends or falls silent:
then every member ends its processes and is ready for the next round, as often as it may be.

What can go wrong, in order: a host does not join in time (Unavailable); a member fails, or its launch is
killed (the others end the round, and wait for it to be started again); the first host's launch is killed or
cannot be reached (each member ends the round by itself: nobody goes on alone); a member does not start again
(all end). Invariants: no member lets processes of a round go on after it has heard that it is over, or has
heard nothing for `message_line.SILENCE_S`; a round begins only when no member that is there runs any of an
earlier one.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from waystation._errors import Conflict, Unavailable
from waystation.cli.meeting_table import Table
from waystation.cli.message_line import MessageLine, proof_of

Tell: TypeAlias = Callable[[str], None]

_CONNECT_AGAIN_S = 0.2
_LAST_WORDS_S = 5.0  # for which the table stays, so that all hear what was said last


class Meeting:
    """The launch of this host among those of all.

    Args:
        names: The names of all hosts; the first has the table.
        host: This one's.
        address: Where the table is.
        secret: What all launches know; empty if they share none.
        patience_s: How long is waited for the others to be ready.
        tell: Takes what people should know.

    Attributes:
        stopped: Why the round is over, if it is and was not ended here.
        left: Why there is no other round, if there is none.

    Raises:
        Conflict: The table's address is taken.
        InvalidInput: It is no address of this host.
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
        self._secret, self._patience_s, self._tell = secret, patience_s, tell
        self._selector = selectors.DefaultSelector()
        self._line: MessageLine | None = None
        self._tried_s = -_CONNECT_AGAIN_S
        self._is_ready = self._is_running = self._is_over = False
        self._refused: str | None = None
        self._nonce = self._theirs = ""
        self._others_missing: list[str] = []
        self.stopped: str | None = None
        self.left: str | None = None
        self._table: Table | None = None
        if host == names[0]:
            self._table = Table(self._selector, names, address, secret)

    def fileno(self) -> int:
        """What is readable when `handle` has something to do."""
        epoll: int = self._selector.fileno()
        return epoll

    def handle(self, timeout_s: float = 0.0) -> None:
        """Takes what others have said; to be called every second at least."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        now_s = time.monotonic()
        if self._table is not None:
            self._table.tick(now_s)
        if self._line is not None:
            self._line.tick(now_s)
        elif not self._is_running and self._refused is None and now_s >= self._tried_s + _CONNECT_AGAIN_S:
            self._tried_s = now_s
            self._connect()

    # ---- rounds --------------------------------------------------------------------------------

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
                raise Conflict(f"the launch of host '{self._names[0]}' refuses this one: {self._refused}")
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
        """This member's processes have ended well; waits until all have, or the round is over otherwise."""
        if self.stopped is None:
            self._say("ended")
        while not self._is_over and self.stopped is None and self.left is None:
            self.handle(_CONNECT_AGAIN_S)
        self._is_running = False
        return self._is_over

    def leave(self, why: str) -> None:
        """There will be no other round, for anybody."""
        self._say("left", why)
        until = time.monotonic() + _LAST_WORDS_S
        while self.left is None and self._line is not None and time.monotonic() < until:
            self.handle(_CONNECT_AGAIN_S)

    def close(self) -> None:
        """Ends the connections, once everybody has heard what was said."""
        if self._table is not None:
            self._table.close()
            until = time.monotonic() + _LAST_WORDS_S
            while self._table.has_others(self._host) and time.monotonic() < until:
                for key, _ in self._selector.select(_CONNECT_AGAIN_S):
                    key.data()
            self._table.end()
        if self._line is not None:
            self._line.close()
        self._selector.close()

    # ---- the connection to the table -----------------------------------------------------------

    def _connect(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_AGAIN_S)
        try:
            connection.connect(self._address)
        except OSError:
            connection.close()
            return
        self._line = MessageLine(self._selector, connection, self._heard, self._lost)

    def _heard(self, message: dict[str, Any]) -> None:
        match message:
            case {"challenge": str(nonce)}:
                self._nonce, self._theirs = secrets.token_hex(16), nonce
                proof = proof_of(self._secret, "member", nonce, self._nonce, self._host, *self._names)
                assert self._line is not None, "something was heard on it"
                self._line.send({"join": self._host, "nonce": self._nonce, "proof": proof})
            case {"refused": str(why)}:
                self._refused = why
            case {"welcome": str(proof)}:
                self._welcomed(proof)
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

    def _welcomed(self, proof: str) -> None:
        own = proof_of(self._secret, "table", self._theirs, self._nonce, self._host, *self._names)
        if not hmac.compare_digest(proof, own):
            self._refused = "it does not know the secret"
        elif self._is_ready:
            self._say("ready")

    def _lost(self) -> None:
        self._line = None
        self._stop(f"the launch of host '{self._names[0]}' cannot be reached any more")

    def _stop(self, why: str) -> None:
        if self._is_running and not self._is_over:
            self._is_running = False
            self.stopped = why

    def _say(self, what: str, why: str = "") -> None:
        if self._line is not None:
            self._line.send({"say": what, "why": why})

    def _missing(self) -> str:
        if self._line is None:
            return f"host '{self._names[0]}'"
        return "host " + ", ".join(f"'{name}'" for name in self._others_missing)
