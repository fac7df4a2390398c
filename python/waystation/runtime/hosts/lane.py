"""The lane of a host: begins messages in order, one after the other, and ends them in the same order.

To begin a message is to dispatch its computations, which does not wait for them; so a host runs ahead of its
devices. A second thread waits for the results in order. Knows neither Ray nor JAX: `begin` is given.

Invariants: messages of an epoch begin strictly by number, whatever the order of arrival; at most `ahead`
messages have begun and not ended; every future that `submit` has returned ends, at the latest in `close`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from waystation._errors import Cancelled
from waystation.runtime.scheduling import ReorderBuffer

T = TypeVar("T")

# Begins a message, telling what it is about to do, and returns what waits for its end and gives its result.
Finish = Callable[[], Any]
Begin = Callable[[T, Callable[[str], None]], Finish]

AHEAD = 32


@dataclass(frozen=True, slots=True)
class Report:
    """How far a lane is.

    Attributes:
        begun: Messages that have begun.
        ended: Messages that have ended, well or not.
        waiting: Messages that have come too early.
        doing: What is done now, in the words of `begin`; empty when nothing is.
        stalled_s: For how long there has been something to do and nothing has ended, in seconds.
    """

    begun: int
    ended: int
    waiting: int
    doing: str
    stalled_s: float


@dataclass(slots=True)
class _Entry(Generic[T]):
    message: T
    future: Future[Any]


class Lane(Generic[T]):
    """Begins and ends messages; see above.

    Args:
        begin: Begins one.
        order: Brings messages into their order.
        ahead: The most messages that have begun and not ended.
        clock: Seconds that grow.
    """

    def __init__(
        self,
        begin: Begin[T],
        order: ReorderBuffer[_Entry[T]] | None = None,
        *,
        ahead: int = AHEAD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._begin = begin
        self._order: ReorderBuffer[_Entry[T]] = ReorderBuffer() if order is None else order
        self._clock = clock
        self._lock = threading.Lock()
        self._begun = self._ended = self._accepted = 0
        self._doing: list[str] = []  # of each message that has begun and not ended
        self._progress_s = clock()
        self._ready: queue.SimpleQueue[_Entry[T] | None] = queue.SimpleQueue()
        self._running: queue.Queue[tuple[_Entry[T], Finish] | None] = queue.Queue(ahead)
        self._threads = [
            threading.Thread(target=self._begin_all, name="waystation: lane", daemon=True),
            threading.Thread(target=self._end_all, name="waystation: results", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, sequence: int, message: T) -> Future[Any]:
        """Takes a message of this epoch; the future has its result. One that comes twice counts once."""
        entry: _Entry[T] = _Entry(message, Future())
        with self._lock:
            ready = self._order.add(self._order.epoch, sequence, entry)
            if ready and self._accepted == self._ended:
                self._progress_s = self._clock()  # it has had nothing to do until now
            self._accepted += len(ready)
            for each in ready:
                self._ready.put(each)
        return entry.future

    def report(self) -> Report:
        """How far it is."""
        with self._lock:
            busy = self._accepted > self._ended
            return Report(
                begun=self._begun,
                ended=self._ended,
                waiting=self._order.waiting,
                doing=self._doing[0] if self._doing else "",
                stalled_s=self._clock() - self._progress_s if busy else 0.0,
            )

    def progress(self) -> None:
        """Notes that something that takes long is going on as it should."""
        with self._lock:
            self._progress_s = self._clock()

    def close(self) -> None:
        """Lets what has come end, and ends the threads."""
        self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _begin_all(self) -> None:
        while (entry := self._ready.get()) is not None:
            with self._lock:
                self._begun += 1
                self._doing.append("")
            try:
                finish = self._begin(entry.message, self._note)
            except BaseException as error:
                finish = _raising(error)
            self._running.put((entry, finish))
        self._running.put(None)

    def _note(self, text: str) -> None:
        with self._lock:
            self._doing[-1] = text

    def _end_all(self) -> None:
        while (running := self._running.get()) is not None:
            entry, finish = running
            result: Any = None
            failed: BaseException | None = None
            try:
                result = finish()
            except BaseException as error:
                failed = error
            with self._lock:
                self._ended += 1
                self._doing.pop(0)
                self._progress_s = self._clock()
            if entry.future.set_running_or_notify_cancel():
                if failed is None:
                    entry.future.set_result(result)
                else:
                    entry.future.set_exception(_as_exception(failed))


def _raising(error: BaseException) -> Finish:
    def finish() -> Any:
        raise error

    return finish


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    return Cancelled(f"the host was stopped by {type(error).__name__}")
