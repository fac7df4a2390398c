"""The execution queue of a host: begins messages in order, one after another, and ends them in that order.

To begin a message is to dispatch its computations, which does not wait for them; so a host runs ahead of its
devices. A second thread waits for the results in order. A message that is *quick* to begin, since it waits
for nobody, is begun by the thread that brings it, where the queue has nothing else to do: another thread
would have to be woken. A message that only moves bytes between devices and storage begins in its turn too,
since hosts agree on that order, and then becomes a *transfer*: a thread of its own waits for its end, and
nothing else does. Knows neither Ray nor JAX: `begin` is given.

Invariants: messages of an epoch begin strictly by number, whatever the order of arrival, and one at a time;
at most `ahead` messages have begun and not ended, and beside them at most `transfers`; every future that
`submit` has returned ends, at the latest in `close`. The limit on transfers cannot deadlock: hosts begin them
in one order, so all earlier ones have ended wherever the first that has not ended is due, and it begins.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from waystation._errors import Cancelled
from waystation.runtime.endings import Ending, TransferEnding
from waystation.runtime.scheduling import ReorderBuffer

T = TypeVar("T")

# Begins a message, telling what it is about to do, and returns what waits for its end and gives its result:
# an `Ending`, a `TransferEnding`, or whatever else can be called.
Finish = Callable[[], Any]
Begin = Callable[[T, Callable[[str], None]], Finish]
# Is told of the end of a message: its result, or what it has failed with.
Ended = Callable[[Any, BaseException | None], None]

AHEAD = 32
TRANSFERS = 8


@dataclass(frozen=True, slots=True)
class Moving:
    """A transfer that is under way.

    Attributes:
        doing: What it is, in the words of `begin`.
        done_bytes: Bytes that it has moved.
        total_bytes: Bytes that it has to move, as far as they are known.
        unchanged_s: For how long no byte has moved, in seconds, as far as reports have seen.
    """

    doing: str
    done_bytes: int
    total_bytes: int
    unchanged_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """How far an execution queue is.

    Attributes:
        begun: Messages that have begun.
        ended: Messages that have ended, well or not.
        waiting: Messages that have come too early.
        doing: What is done now, in the words of `begin`; empty when nothing is.
        stalled_s: For how long there has been something to do, other than transfers, and nothing has ended,
            in seconds.
        awaits: The work, and the host, of a block that is waited for, if nothing else is under way.
        moving: Transfers that are under way.
        is_elsewhere: Whether what is done now runs on no device: a function of Python, or storage.
        idle_s: For how long the process has used next to no processor time, in seconds; None where that says
            nothing about its devices.
    """

    begun: int
    ended: int
    waiting: int
    doing: str
    stalled_s: float
    awaits: tuple[int, str] | None = None
    moving: tuple[Moving, ...] = ()
    is_elsewhere: bool = False
    idle_s: float | None = None


@dataclass(slots=True)
class _Entry(Generic[T]):
    message: T
    ended: Ended


class _Transfer:
    """A transfer that is under way.

    Args:
        doing: What it is.
        finish: Waits for its end.
        now_s: When it began.
    """

    def __init__(self, doing: str, finish: TransferEnding, now_s: float) -> None:
        self.doing = doing
        self.finish = finish
        self._seen = finish.progress()
        self._changed_s = now_s

    def moving(self, now_s: float) -> Moving:
        """How far it is."""
        seen = self.finish.progress()
        if seen != self._seen:
            self._seen, self._changed_s = seen, now_s
        return Moving(self.doing, *seen, unchanged_s=now_s - self._changed_s)


class ExecutionQueue(Generic[T]):
    """Begins and ends messages; see above.

    Args:
        begin: Begins one.
        order: Brings messages into their order.
        ahead: The most messages that have begun and not ended, without transfers.
        transfers: The most transfers that are under way.
        clock: Seconds that grow.
        is_quick: Whether a message waits for nobody before it has begun.
        is_transfer: Whether a message is going to be a transfer once it has begun.
        on_pause: Called by a thread that ends messages before it waits, or has nothing more to end.
        ends_at_once: Whether a thread that has begun a message ends it too, where there is nothing to wait
            for: another thread would have to be woken.
    """

    def __init__(
        self,
        begin: Begin[T],
        order: ReorderBuffer[_Entry[T]] | None = None,
        *,
        ahead: int = AHEAD,
        transfers: int = TRANSFERS,
        clock: Callable[[], float] = time.monotonic,
        is_quick: Callable[[T], bool] = lambda message: False,
        is_transfer: Callable[[T], bool] = lambda message: False,
        on_pause: Callable[[], None] = lambda: None,
        ends_at_once: bool = False,
    ) -> None:
        self._begin = begin
        self._order: ReorderBuffer[_Entry[T]] = ReorderBuffer() if order is None else order
        self._ahead = ahead
        self._most_transfers = transfers
        self._clock = clock
        self._is_quick = is_quick
        self._is_transfer = is_transfer
        self._on_pause = on_pause
        self._ends_at_once = ends_at_once
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._begun = self._ended = self._accepted = 0
        self._doing: deque[str] = deque()  # of each message that has begun and not ended
        self._transfers: dict[threading.Thread, _Transfer] = {}
        self._progress_s = clock()
        self._line: deque[_Entry[T]] = deque()  # whose turn has come
        self._is_beginning = False  # whether a thread is at that; it takes all of the line
        self._is_ending = False  # whether the thread for results is about to tell of one
        self._handed_over: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[tuple[_Entry[T], Finish] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._begin_all, name="waystation: execution", daemon=True),
            threading.Thread(target=self._end_all, name="waystation: results", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, sequence: int, message: T) -> Future[Any]:
        """Takes a message of this epoch; the future has its result. One that comes twice counts once."""
        future: Future[Any] = Future()
        self.take(sequence, message, functools.partial(_resolve, future))
        return future

    def take(self, sequence: int, message: T, ended: Ended) -> None:
        """Takes a message of this epoch. One that comes twice counts once.

        Args:
            sequence: Its number.
            message: The message.
            ended: Is told of its end; raises nothing. One thread tells of messages in the order of their
                numbers, the thread of a transfer of that transfer.
        """
        with self._lock:
            ready = self._order.add(self._order.epoch, sequence, _Entry(message, ended))
            if ready and not self._is_busy():
                self._progress_s = self._clock()  # it has had nothing to do until now
            self._accepted += len(ready)
            self._line.extend(ready)
            if self._is_beginning or not ready:
                return
            self._is_beginning = True
        if not self._begin_line(is_lane=False):
            self._handed_over.put(True)

    def report(self) -> Report:
        """How far it is."""
        with self._lock:
            now_s = self._clock()
            return Report(
                begun=self._begun,
                ended=self._ended,
                waiting=self._order.waiting,
                doing=self._doing[0] if self._doing else "",
                stalled_s=now_s - self._progress_s if self._is_busy() else 0.0,
                moving=tuple(each.moving(now_s) for each in self._transfers.values()),
            )

    def progress(self) -> None:
        """Notes that something that takes long is going on as it should."""
        self._progress_s = self._clock()

    def close(self) -> None:
        """Lets what has come end, and ends the threads; nothing is taken meanwhile, or later."""
        self._handed_over.put(False)
        for thread in self._threads:
            thread.join()
        with self._lock:
            transfers = list(self._transfers)
        for thread in transfers:
            thread.join()

    def _is_room(self) -> bool:
        """Whether the first in line may begin."""
        if self._is_transfer(self._line[0].message) and len(self._transfers) >= self._most_transfers:
            return False
        return len(self._doing) < self._ahead

    def _is_busy(self) -> bool:
        return self._accepted - self._ended > len(self._transfers)

    def _begin_all(self) -> None:
        while self._handed_over.get():
            self._begin_line(is_lane=True)
        self._running.put(None)

    def _begin_line(self, *, is_lane: bool) -> bool:
        """Begins what is in line; whether that was all. The queue's own thread begins what others would have
        to wait for."""
        while True:
            with self._lock:
                if not self._line:
                    self._is_beginning = False
                    return True
                if is_lane:
                    while not self._is_room():
                        self._has_room.wait()
                elif len(self._doing) >= self._ahead or not self._is_quick(self._line[0].message):
                    return False
                entry = self._line.popleft()
                self._begun += 1
                self._doing.append("")
            try:
                finish = self._begin(entry.message, self._note)
            except BaseException as error:
                finish = _raising(error)
            if isinstance(finish, TransferEnding):
                self._begin_transfer(entry, finish)
            elif self._ends_at_once and self._is_alone() and is_over(finish):
                self._end(entry, finish)
                self._on_pause()
            else:
                self._running.put((entry, finish))

    def _begin_transfer(self, entry: _Entry[T], finish: TransferEnding) -> None:
        thread = threading.Thread(
            target=self._end_transfer, args=(entry, finish), name="waystation: transfer", daemon=True
        )
        with self._lock:
            self._transfers[thread] = _Transfer(self._doing.pop(), finish, self._clock())
            self._progress_s = self._clock()
            self._has_room.notify()
        thread.start()

    def _end_transfer(self, entry: _Entry[T], finish: TransferEnding) -> None:
        result, failed = _outcome(finish)
        with self._lock:
            del self._transfers[threading.current_thread()]
            self._ended += 1
            self._has_room.notify()
        entry.ended(result, failed)
        self._on_pause()

    def _note(self, text: str) -> None:
        self._doing[-1] = text

    def _end_all(self) -> None:
        while (running := self._next_running()) is not None:
            self._is_ending = True
            self._end(*running)
            self._is_ending = False

    def _end(self, entry: _Entry[T], finish: Finish) -> None:
        result, failed = _outcome(finish)
        with self._lock:
            self._ended += 1
            self._doing.popleft()
            self._progress_s = self._clock()
            self._has_room.notify()
        entry.ended(result, failed)

    def _is_alone(self) -> bool:
        """Whether all messages before the one that has begun last have been told of."""
        return len(self._doing) == 1 and not self._is_ending

    def _next_running(self) -> tuple[_Entry[T], Finish] | None:
        """What has to be ended next; if that is to be waited for, others are told first."""
        try:
            running = self._running.get_nowait()
        except queue.Empty:
            self._on_pause()
            return self._running.get()
        if running is not None and not is_over(running[1]):
            self._on_pause()
        return running


def is_over(finish: Finish) -> bool:
    """Whether there is nothing to wait for, as far as that can be seen."""
    return isinstance(finish, Ending) and finish.is_ready()


def _outcome(finish: Finish) -> tuple[Any, BaseException | None]:
    """What a message has come to: its result, or what it has failed with."""
    try:
        return finish(), None
    except BaseException as error:
        return None, error


def _resolve(future: Future[Any], result: Any, failed: BaseException | None) -> None:
    if future.set_running_or_notify_cancel():
        if failed is None:
            future.set_result(result)
        else:
            future.set_exception(as_exception(failed))


def _raising(error: BaseException) -> Finish:
    def finish() -> Any:
        raise error

    return finish


def as_exception(error: BaseException) -> Exception:
    """What stands for what ends a message: what would end the whole process only stops the host."""
    if isinstance(error, Exception):
        return error
    return Cancelled(f"the host was stopped by {type(error).__name__}")
