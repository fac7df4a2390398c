"""How the processes of one program agree: `current` finds the coordinator, `base` says what one is.

`collective` has the rounds that all loads of several processes have in common.
"""

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

__all__ = ["Coordinator", "Session", "current", "of_torch"]

_SINGLE = SingleCoordinator()


class _Known:
    """The coordinator over one framework, and what it is over.

    One for all threads, because its sessions are numbered; another as soon as the program has shut down
    what it is over and set up anew.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
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
        with contextlib.suppress(Exception):  # a framework that is being set up, or torn down
            found = self._module.find()
            if found is not None:
                self._of_parent.append((_reference(found[0]), self._process_id))
        self._process_id = os.getpid()

    def coordinator(self) -> Coordinator | None:
        """The coordinator, made if the framework was set up anew; None if it connects no processes."""
        found = self._module.find()
        if found is None:
            return None
        over, process_index, process_count = found
        with self._lock:
            if self._coordinator is None or self._over() is not over:
                for reference, process_id in self._of_parent:
                    if reference() is over:
                        what = "what the processes of this program talk through"
                        raise _forks.not_of_this_process(what, process_id, ADVICE)
                self._coordinator = self._module.coordinator(over, process_index, process_count)
                self._over = _reference(over)
            return self._coordinator


def _reference(over: Any) -> Callable[[], Any]:
    """A weak one where that is possible: what the program has destroyed must not live on here."""
    try:
        return weakref.ref(over)
    except TypeError:
        return lambda: over


_JAX, _TORCH = _Known(jax_distributed), _Known(torch_distributed)


def current() -> Coordinator:
    """The coordinator of this program as it runs now.

    That of `jax.distributed` if it is initialized with several processes, else that of
    `torch.distributed`, else that of one process. Frameworks that are not loaded stay so.

    Raises:
        Unavailable: The store that the processes talk through cannot be reached.
        Unsupported: The framework's version lacks something.
    """
    return _JAX.coordinator() or of_torch()


def of_torch() -> Coordinator:
    """The coordinator that numbers processes as `torch.distributed` does, whatever else connects them.

    Raises:
        Unavailable: The store that the processes talk through cannot be reached.
    """
    return _TORCH.coordinator() or _SINGLE
