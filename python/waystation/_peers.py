"""What those share whose sockets are Python's, and whose proofs are those of `_native.PeerChannel`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

TELL_AGAIN_S = 60.0


def ends_of(opened: socket.socket) -> tuple[str, str]:
    """The addresses of both ends of a connection, without their ports, as `_native.PeerKeys` takes them.

    Raises:
        OSError: The connection has ended.
    """
    return str(opened.getsockname()[0]), str(opened.getpeername()[0])


class TurnedAway:
    """Tells of clients that were turned away, so rarely that strangers cannot fill a log.

    Args:
        tell: Takes a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told_s = -TELL_AGAIN_S
        self._untold = 0

    def note(self, address: str, why: object) -> None:
        """A client of an address was turned away: it is told now, or counted with the next one that is."""
        now_s = time.monotonic()
        if now_s < self._told_s + TELL_AGAIN_S:
            self._untold += 1
            return
        others = f" ({self._untold} others were since the last that was told)" if self._untold else ""
        self._told_s, self._untold = now_s, 0
        self._tell(f"a client from {address} was turned away: {why}{others}")
