"""One shape for everything that runs in the background: `AsyncResponse`.

Work runs in one thread of its own, which is not a daemon: the interpreter waits for it at exit, so a
save that was started is finished. The interpreter does so once, and calls exit functions after that: what
they start is waited for by the exit function of this module, and what begins later still ends before the call
that began it returns. A failure is kept for whoever asks. One that nobody asked for by the end of the program
is logged, and the program ends with status 1.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from waystation._arguments import require_function
from waystation._errors import Cancelled, InvalidInput, Unavailable
from waystation.layouts.opened import Job

T = TypeVar("T")

_log = logging.getLogger("waystation")


class Progress:
    """What a background operation tells its handle: its jobs, and whether to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._watched: list[Job] = []
        self._finished = (0, 0)
        self.cancelled: bool = False

    def add(self, job: Job) -> None:
        """Counts a job into the progress; cancels it at once if cancellation was asked for."""
        with self._lock:
            self._jobs.append(job)
            if self.cancelled:
                job.cancel()

    def watch(self, job: Job) -> None:
        """Cancels a job if cancellation is asked for; what it moves is no progress."""
        with self._lock:
            self._watched.append(job)
            if self.cancelled:
                job.cancel()

    def cancel(self) -> None:
        """Stops running jobs and those to come."""
        with self._lock:
            self.cancelled = True
            for job in (*self._jobs, *self._watched):
                job.cancel()

    def renew_lock(self) -> None:
        """Gives a forked child a lock that no thread of its parent holds."""
        self._lock = threading.Lock()

    def fraction(self) -> tuple[int, int]:
        """`(done, total)` bytes of all jobs so far."""
        with self._lock:
            return self._fraction()

    def _fraction(self) -> tuple[int, int]:
        parts = [self._finished, *(job.progress() for job in self._jobs)]
        return sum(done for done, _ in parts), sum(total for _, total in parts)

    def close(self) -> None:
        """Lets go of the jobs, and so of the memory that they keep alive."""
        with self._lock:
            self._finished = self._fraction()
            self._jobs.clear()
            self._watched.clear()


class _Failure:
    """Keeps an error that nobody has seen yet."""

    def __init__(self, what: str, error: BaseException) -> None:
        self.what = what
        self.error = error
        self.is_reported: bool = False


def _has_main_thread_ended() -> bool:
    """Whether the caller is an exit function: the main thread has ended, and runs them."""
    main = threading.main_thread()
    return threading.current_thread() is main and not main.is_alive()


_unread: list[_Failure] = []
# Set once nobody waits for what begins: the exit function of this module has been called, or never will be,
# since another one imports the module.
_is_late = threading.Event()
if _has_main_thread_ended():
    _is_late.set()
# Those whose locks a forked child has to make anew.
_responses: weakref.WeakSet[AsyncResponse[Any]] = weakref.WeakSet()


def _settle(finished: asyncio.Future[None]) -> None:
    if not finished.done():
        finished.set_result(None)


class AsyncResponse(Generic[T]):
    """The result of an operation that runs in the background.

    Also awaitable: `await response` gives what `result()` returns.

    It belongs to the process that started the operation. In a child that was forked while the operation ran,
    every method raises InvalidInput: the thread that does the work is in the parent only.

    Args:
        what: What it does, for people.
        work: What runs in the background.
        progress: Where it tells how far it is.
        waits_if_late: Whether an operation that an exit function begins, when nobody waits for it any more,
            ends before this returns. False where it needs what the caller holds.

    Raises:
        Unavailable: The system starts no thread.
    """

    def __init__(
        self,
        what: str,
        work: Callable[[Progress], T],
        progress: Progress | None = None,
        *,
        waits_if_late: bool = True,
    ) -> None:
        self._what = what
        self._process_id = os.getpid()
        self._progress = Progress() if progress is None else progress
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], Any]] = []
        self._value: T | None = None
        self._failure: _Failure | None = None
        _responses.add(self)
        # The options in effect say how an object store is reached.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._run, work), name=f"waystation: {what}", daemon=False
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            raise Unavailable(
                f"could not start a thread for {what}: {error}; allow more processes (ulimit -u) or more "
                "memory, or use the call that does not end in _async"
            ) from error
        # Threads that an operation has started itself do not wait here: it may hold what they need.
        if _is_late.is_set() and waits_if_late and threading.current_thread() is threading.main_thread():
            _wait_for_all()
            _report_unread()

    def __repr__(self) -> str:
        # Asks for no lock, which a thread of a forked child's parent may hold.
        if not self._finished.is_set():
            state = "running" if os.getpid() == self._process_id else f"running in process {self._process_id}"
        elif self._failure is None:
            state = "done"
        else:
            state = f"failed with {type(self._failure.error).__name__}: {self._failure.error}"
        return f"<AsyncResponse: {self._what}, {state}>"

    def _run(self, work: Callable[[Progress], T]) -> None:
        try:
            self._value = work(self._progress)
        except BaseException as error:
            self._failure = _Failure(self._what, error)
            _unread.append(self._failure)
        self._progress.close()
        with self._lock:
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)
        del self  # as in `result`

    def _call(self, callback: Callable[[], Any]) -> None:
        try:
            callback()
        except Exception:
            _log.exception("a callback of %s failed", self._what)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the end and returns the value.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: The operation still runs after `timeout` seconds; it goes on.
            WaystationError: What the operation failed with.
            InvalidInput: The operation runs in the parent of this process, or it is the operation itself that
                asks, as a function that it calls: it would wait for its own end.
        """
        error = self.exception(timeout)
        if error is None:
            return self._value  # type: ignore[return-value]
        try:
            raise error
        finally:
            del self, error  # this frame is one of the error's, which the handle holds

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the end; returns what the operation failed with, None if it succeeded.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            TimeoutError: The operation still runs after `timeout` seconds; it goes on.
            InvalidInput: As `result` does.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self._what} still runs after {timeout} s")
        if self._failure is None:
            return None
        with contextlib.suppress(ValueError):
            _unread.remove(self._failure)
        return self._failure.error

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; returns whether the operation has ended, well or not.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Raises:
            InvalidInput: As `result` does.
        """
        self._require_owner()
        if threading.current_thread() is self._thread and not self._finished.is_set():
            raise InvalidInput(
                f"{self._what} cannot wait for its own end; call result() outside of what it calls"
            )
        # The event's lock is asked for only where this process can release it.
        return self._finished.is_set() or self._finished.wait(timeout)

    def done(self) -> bool:
        """Whether the operation has ended, well or not."""
        self._require_owner()
        return self._finished.is_set()

    def is_running_here(self) -> bool:
        """Whether a thread of this process still works on it, or calls what waited for its end."""
        return os.getpid() == self._process_id and self._thread.is_alive()

    def join(self) -> None:
        """Waits until its thread has ended."""
        self._thread.join()

    def renew_locks(self) -> None:
        """Gives a forked child locks that no thread of its parent holds."""
        self._lock = threading.Lock()
        self._progress.renew_lock()

    def _require_owner(self) -> None:
        """Refuses an operation that still ran in the parent when this process was forked."""
        if os.getpid() != self._process_id and not self._finished.is_set():
            raise InvalidInput(
                f"{self._what} runs in process {self._process_id}, the parent of this one, and its handle "
                "belongs to that process; ask for the result there"
            )

    def progress(self) -> tuple[int, int]:
        """`(done, total)` bytes moved so far."""
        self._require_owner()
        return self._progress.fraction()

    def cancel(self) -> None:
        """Asks the operation to stop; `result()` then raises Cancelled unless it had ended before.

        A cancelled save leaves nothing behind.
        """
        self._require_owner()
        self._progress.cancel()

    def on_complete(self, callback: Callable[[T], Any]) -> None:
        """Calls `callback(value)` once the operation has succeeded: in its thread, or now if it has.

        It is not called if the operation fails: see `on_end`.
        """
        require_function("callback", callback)

        def succeeded() -> None:
            if self._failure is None:
                callback(self._value)  # type: ignore[arg-type]

        self._when_ended(succeeded)

    def on_end(self, callback: Callable[[AsyncResponse[T]], Any]) -> None:
        """Calls `callback(response)` when the operation has ended, well or not: in its thread, or now if it
        has."""
        require_function("callback", callback)
        self._when_ended(lambda: callback(self))

    def _when_ended(self, callback: Callable[[], Any]) -> None:
        self._require_owner()
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            # The loop may be closed by the time the work is done.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, finished)

        self._when_ended(wake)
        yield from finished.__await__()
        return self.result()


class _ResponseFuture(Future[T]):
    """Ends as a response does. Whoever asks it for a result or an error has seen a failure."""

    def __init__(self, response: AsyncResponse[T]) -> None:
        super().__init__()
        self._response = response
        self.set_running_or_notify_cancel()
        response.on_end(self._settle)

    def _settle(self, ended: AsyncResponse[T]) -> None:
        # Not by its methods: nobody has asked yet.
        if ended._failure is None:
            self.set_result(cast(T, ended._value))
        else:
            self.set_exception(ended._failure.error)

    def result(self, timeout: float | None = None) -> T:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._response.exception()
        return error


def future_of(response: AsyncResponse[T]) -> Future[T]:
    """A future of the standard library that ends as a response does.

    A failure that nobody asks this future for is logged at the end of the program, as one of the response.
    """
    return _ResponseFuture(response)


class _FailingExit:
    """Ends the process with status 1 when the interpreter empties the table of modules, at its end.

    An exit function cannot change the status, and one that ended the process itself would keep others from
    being called. By the time of this all of them have been called, and what was printed has been flushed.
    """

    # Modules may be gone by then, and an exit function may have asked for all that had failed.
    def __del__(self, end: Callable[[int], Any] = os._exit, unread: list[_Failure] = _unread) -> None:
        if unread:
            end(1)


@atexit.register
def _at_exit() -> None:
    """Waits for what exit functions have begun, which are called after the interpreter has waited."""
    _wait_for_all()
    _is_late.set()
    _report_unread()


def _wait_for_all() -> None:
    """Waits for what runs in this process, and for what that begins."""
    while running := [response for response in list(_responses) if response.is_running_here()]:
        for response in running:
            response.join()


def _report_unread() -> None:
    """Logs failures that nobody has asked for, and lets the process end with status 1."""
    _unread[:] = [failure for failure in _unread if not isinstance(failure.error, Cancelled)]
    failures = [failure for failure in _unread if not failure.is_reported]
    for failure in failures:
        failure.is_reported = True
        _log.error(
            "%s failed, and the program has ended without asking for the result: %s\n(Call result() on what "
            "the call returned. The program ends with status 1.)",
            failure.what,
            "\n".join((str(failure.error), *getattr(failure.error, "__notes__", ()))),
        )
    if failures:
        # The table's only reference: nothing that outlives the table may keep the object.
        sys.modules[f"{__name__}.exit"] = cast(ModuleType, _FailingExit())


def _renew_after_fork() -> None:
    """Leaves a forked child no lock that a thread of its parent may hold, and no failure to report twice."""
    _unread.clear()
    for response in list(_responses):
        response.renew_locks()


os.register_at_fork(after_in_child=_renew_after_fork)
