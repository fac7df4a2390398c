"""How the processes of one program agree: `current` finds the coordinator, `base` says what one is."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from waystation import _forks
from waystation.coordination import jax_distributed, torch_distributed
from waystation.coordination.base import Coordinator, Session
from waystation.coordination.single import SingleCoordinator
from waystation.coordination.store_coordinator import ADVICE

__all__ = ["Coordinator", "Session", "current"]

_SINGLE = SingleCoordinator()


class _Known:
    """The coordinator in use, and what it is over.

    One for all threads, because its sessions are numbered; another as soon as the program has shut down
    what it is over and set up anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: Callable[[], Any] = lambda: None
        self._coordinator: Coordinator | None = None
        self._process_id = os.getpid()
        # In a forked child: what its parent ran over, which the child must not talk through.
        self._of_parent: list[tuple[Callable[[], Any], int]] = []
        _forks.watch(self)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`."""
        self._lock = threading.Lock()
        for module in (jax_distributed, torch_distributed):
            with contextlib.suppress(Exception):  # a framework that is being set up, or torn down
                found = module.find()
                if found is not None:
                    self._of_parent.append((_reference(found[0]), self._process_id))
        self._process_id = os.getpid()

    def of(self, module: Any, over: Any, process_index: int, process_count: int) -> Coordinator:
        """The coordinator over a client or a process group; made if it is a new one."""
        with self._lock:
            if self._coordinator is None or self._over() is not over:
                for reference, process_id in self._of_parent:
                    if reference() is over:
                        what = "what the processes of this program talk through"
                        raise _forks.not_of_this_process(what, process_id, ADVICE)
                self._coordinator = module.coordinator(over, process_index, process_count)
                self._over = _reference(over)
            return self._coordinator


def _reference(over: Any) -> Callable[[], Any]:
    """A weak one where that is possible: what the program has destroyed must not live on here."""
    try:
        return weakref.ref(over)
    except TypeError:
        return lambda: over


_KNOWN = _Known()


def current() -> Coordinator:
    """The coordinator of this program as it runs now.

    That of `jax.distributed` if it is initialized with several processes, else that of
    `torch.distributed`, else that of one process. Frameworks that are not loaded stay so.

    Raises:
        Unavailable: The store that the processes talk through cannot be reached.
        Unsupported: The framework's version lacks something.
    """
    for module in (jax_distributed, torch_distributed):
        found = module.find()
        if found is not None:
            return _KNOWN.of(module, *found)
    return _SINGLE
