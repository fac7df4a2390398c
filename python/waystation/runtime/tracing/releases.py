"""What a client does not need any more, on its way to whoever tells the backend.

Arrays, programs and functions are given up by the collection of garbage, which happens at any time, in any
thread, also in the middle of another call: so what is given up is only put in a queue, which allows that.
"""

from __future__ import annotations

import queue
from typing import NamedTuple


class ForgottenProgram(NamedTuple):
    """A program that was installed is not needed any more."""

    fingerprint: str


class ForgottenFunction(NamedTuple):
    """A function that was registered is not needed any more."""

    key: str


# Handles of arrays, programs and functions; None ends whoever takes them.
Freed = queue.SimpleQueue["int | ForgottenProgram | ForgottenFunction | None"]


class Registration:
    """The client's hold on a function; the last who drops it has the backend forget that.

    Args:
        key: What the backend knows it by.
        exported: Its code.
        freed: Where to say that it is not needed any more.
    """

    __slots__ = ("__weakref__", "_forgotten", "_freed", "exported", "key")

    def __init__(self, key: str, exported: bytes, freed: Freed) -> None:
        self.key: str = key
        self.exported: bytes = exported
        self._freed = freed
        self._forgotten = ForgottenFunction(key)

    def __del__(self) -> None:
        self._freed.put(self._forgotten)
