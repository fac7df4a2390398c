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


class _State:
    """How many pauses are in effect, and whether the first of them found the collector running."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pauses = 0
        self.was_enabled = False


_state = _State()


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Within it (in any thread) no collection starts by itself; usable as a decorator, and nested."""
    with _state.lock:
        if _state.pauses == 0:
            _state.was_enabled = gc.isenabled()
            gc.disable()
        _state.pauses += 1
    try:
        yield
    finally:
        with _state.lock:
            _state.pauses -= 1
            if _state.pauses == 0 and _state.was_enabled:
                gc.enable()
