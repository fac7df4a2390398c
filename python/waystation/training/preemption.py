"""Preemption: whether the program was told that it will be ended soon, and should save now.

Programs of `jax.distributed` are told by JAX, which listens to SIGTERM and agrees with all processes on the
step at which to save. Any other program is told by `handle_sigterm`, if it asks for that: nothing here
touches a signal by itself.

Invariants: a handler that was there before is called too; taking ours away puts it back.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from waystation._errors import InvalidInput
from waystation.coordination import jax_preemption

_log = logging.getLogger("waystation")

_installed: list[SigtermHandler] = []


class SigtermHandler:
    """Notes that SIGTERM has come, instead of letting it end the program; see `handle_sigterm`.

    Attributes:
        received: Set once it has come.
    """

    def __init__(self) -> None:
        self.received: threading.Event = threading.Event()
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def install(self) -> None:
        """Begins to listen, unless JAX does already."""
        if jax_preemption.is_served():
            _log.info("JAX listens for notices of preemption already; SIGTERM is left to it")
            return
        if threading.current_thread() is not threading.main_thread():
            raise InvalidInput("signals can be handled from the main thread only; call handle_sigterm there")
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._is_installed = True
        _installed.append(self)

    def uninstall(self) -> None:
        """Ends it, and puts back what handled the signal before; idempotent."""
        if not self._is_installed:
            return
        self._is_installed = False
        _installed.remove(self)
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            # None is a handler that was not set from Python, and cannot be set from there either.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received.set()
        if callable(self._previous):
            self._previous(number, frame)


def handle_sigterm() -> SigtermHandler:
    """Has SIGTERM, by which schedulers announce that they will end a program, noted instead of ending it.

    A `Checkpointer` whose policy saves at preemption then saves at the next step, and its `is_preempted`
    tells the program to end. A handler that was there before is called as well. Every process of a program
    has to call this, from its main thread. Programs of `jax.distributed` need not: JAX listens there, and is
    left to.

    Returns:
        The handler, which ends with `uninstall()` or a `with` block.
    """
    handler = SigtermHandler()
    handler.install()
    return handler


def is_handled() -> bool:
    """Whether this program has asked for SIGTERM to be noted."""
    return bool(_installed)


def was_received() -> bool:
    """Whether it has come, in this process."""
    return any(handler.received.is_set() for handler in _installed)
