"""Work in several threads, also while the program ends.

The executors of `concurrent.futures` refuse work once the main thread has ended. Other threads may go on
then, such as those of a server, and save and load as before. The threads of this module end when there is
nothing to do, so that nobody waits for them at the end of a program.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")


def processor_count() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no such call
        return os.cpu_count() or 1


class Threads(concurrent.futures.Executor):
    """An executor that takes work as long as anything of the program runs.

    Work runs in the context variables of the call that gave it. Where the system starts no thread, work runs
    in the thread that gives it.

    Args:
        most: How many threads work at a time.
        name: Of what they do, for the names of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = f"waystation: {name}"
        self._lock = threading.Lock()
        self._pending: collections.deque[tuple[concurrent.futures.Future[Any], Callable[[], None]]]
        self._pending = collections.deque()
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, call: Callable[..., R], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[R]:
        """See `concurrent.futures.Executor`."""
        future: concurrent.futures.Future[R] = concurrent.futures.Future()
        context = contextvars.copy_context()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(call, *args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_closed:
                raise RuntimeError("this executor has been shut down")
            self._pending.append((future, work))
            thread = self._new_thread()
        if thread is not None and not is_started(thread):
            with self._lock:
                self._threads.discard(thread)
                is_alone = not self._threads
            if is_alone:
                self._work(None)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor`."""
        with self._lock:
            self._is_closed = True
            if cancel_futures:
                for future, _ in self._pending:
                    future.cancel()
            threads = list(self._threads)
        for thread in threads if wait else ():
            if thread.ident is not None:  # an interrupt kept it from starting
                thread.join()

    def _new_thread(self) -> threading.Thread | None:
        """A thread for one more piece of work; None if there are as many as there may be."""
        if len(self._threads) >= self._most:
            return None
        thread = threading.Thread(target=lambda: self._work(thread), name=self._name)
        self._threads.add(thread)
        return thread

    def _work(self, thread: threading.Thread | None) -> None:
        """Does what there is to do."""
        while True:
            with self._lock:
                if not self._pending:
                    if thread is not None:
                        self._threads.discard(thread)
                    return
                _, work = self._pending.popleft()
            work()


def is_started(thread: threading.Thread) -> bool:
    """Starts a thread; returns whether the system has done it."""
    try:
        thread.start()
    except RuntimeError as error:
        if "new thread" not in str(error):  # raised by a signal handler
            raise
        return False
    return True
