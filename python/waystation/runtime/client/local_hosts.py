"""Hosts of this process: devices that no other has, and the lane that they are used by."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import jax
import numpy as np

from waystation.runtime.devices import DeviceId
from waystation.runtime.execution import HostExecution, LocalExchange
from waystation.runtime.hosts.lane import Lane
from waystation.runtime.messages import Fetched

Note = Callable[[str], None]
Task = Callable[[Note], Callable[[], Any]]


class LocalHost:
    """The one host of an island: its devices, and the lane that they are used by."""

    def __init__(self, name: str, devices: Sequence[jax.Device], exchange: LocalExchange) -> None:
        self.name = name
        self._devices = devices
        self.execution = HostExecution(name, lambda device: devices[device.index], exchange)
        self._sequence = itertools.count()
        self._lock = threading.Lock()
        self._lane: Lane[Task] = Lane(lambda task, note: task(note))
        self.execution.on_compiled = self._lane.progress
        self._process_id = os.getpid()
        # The threads of the lane run code of JAX, which aborts a program that ends while they do.
        atexit.register(self._close_at_exit)

    def submit(self, task: Task) -> Future[Any]:
        """Has something done after everything before."""
        with self._lock:
            return self._lane.submit(next(self._sequence), task)

    def do(self, action: Callable[[], Any]) -> Future[Any]:
        """Has something done that does not have to be waited for apart."""

        def task(note: Note) -> Callable[[], Any]:
            del note
            done = action()
            return lambda: done

        return self.submit(task)

    def device(self, device: DeviceId) -> jax.Device:
        """One of its devices."""
        return self._devices[device.index]

    def close(self) -> None:
        """Lets what has come end."""
        atexit.unregister(self._close_at_exit)
        self._lane.close()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process_id:
            self._lane.close()


def whole(fetched: Fetched) -> np.ndarray[Any, Any]:
    """The array of all its shards."""
    if len(fetched.blocks) == 1 and fetched.blocks[0][1].shape == fetched.shape:
        return fetched.blocks[0][1]
    found = np.empty(fetched.shape, fetched.blocks[0][1].dtype)
    for offset, block in fetched.blocks:
        place = tuple(slice(begin, begin + extent) for begin, extent in zip(offset, block.shape, strict=True))
        found[place] = block
    return found


def result_of(future: Future[Any], timeout_s: float | None) -> Any:
    """What a future has, or its error.

    Raises:
        TimeoutError: It has not ended by then.
    """
    try:
        return future.result(timeout_s)
    except FutureTimeout:
        raise TimeoutError(f"an array is not there after {timeout_s:g} s; it is still being made") from None
