"""Pauses Python's cyclic garbage collector while many small objects are made that all stay alive.

Planning a state of thousands of leaves makes tens of thousands of them at once; each full collection
that they trigger walks everything that the program holds (a tenth of a second and more with JAX loaded)
and finds nothing. Paused only around planning, never while data moves.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from waystation import _forks


class _State:
    """How many pauses are in effect, and whether the first of them found the collector running."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pauses = 0
        self.was_enabled = False


class _Here:
    """The state of this process."""

    def __init__(self) -> None:
        self.state = _State()
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: the pauses of other threads of the parent are over."""
        before, self.state = self.state, _State()
        if before.pauses and before.was_enabled:
            gc.enable()


_here = _Here()


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Within it (in any thread) no collection starts by itself; usable as a decorator, and nested."""
    state = _here.state
    with state.lock:
        if state.pauses == 0:
            state.was_enabled = gc.isenabled()
            gc.disable()
        state.pauses += 1
    try:
        yield
    finally:
        with state.lock:
            state.pauses -= 1
            if state.pauses == 0 and state.was_enabled:
                gc.enable()
