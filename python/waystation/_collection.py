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

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Within it (in any thread) no collection starts by itself; usable as a decorator, and nested."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
