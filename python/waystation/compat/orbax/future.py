"""What a handler returns of work in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["ChainedFuture", "CommitFutureAwaitingContractedSignals", "Future", "NoopFuture"]


@runtime_checkable
class Future(Protocol):
    """The end of work in the background."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end, and returns what it gives.

        Args:
            timeout: For how many seconds at most; None for any number.
        """
        ...


class NoopFuture:
    """Of work that has ended."""

    def result(self, timeout: float | None = None) -> None:
        """Returns at once."""

    def cancel(self) -> None:
        """Does nothing."""


class ChainedFuture:
    """Waits for several, and then calls a function.

    Args:
        futures: What is waited for.
        cb: What is called then.
    """

    def __init__(self, futures: Sequence[Future], cb: Callable[[], None]) -> None:
        self._futures = futures
        self._callback = cb

    def result(self, timeout: float | None = None) -> None:
        """Waits.

        Raises:
            TimeoutError: It took longer.
        """
        begun = time.monotonic()
        for future in self._futures:
            left = None if timeout is None else timeout - (time.monotonic() - begun)
            if left is not None and left <= 0:
                raise TimeoutError(f"the work in the background took longer than {timeout} seconds")
            future.result(timeout=left)
        self._callback()

    def cancel(self) -> None:
        """Cancels those that can be."""
        for future in self._futures:
            cancel = getattr(future, "cancel", None)
            if callable(cancel):
                cancel()


class ThreadFuture:
    """Work in a thread of its own.

    Args:
        work: What is done.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="waystation: handler of orbax", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self, timeout: float | None = None) -> Any:
        """Waits.

        Raises:
            TimeoutError: It took longer.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the work in the background took longer than {timeout} seconds")
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        """Does nothing: what is written is left, and the save around it removes it."""


class CommitFutureAwaitingContractedSignals(ThreadFuture):
    """Work of a coroutine in a thread of its own.

    Args:
        coro: The coroutine.
        name: Has no effect.
        send_signals: Refused but for None: no step of a save waits for signals of a handler.
        timeout_secs: Has no effect: the save around it has a bound.
        operation_id: Has no effect.
    """

    def __init__(
        self,
        coro: Coroutine[Any, Any, None],
        *,
        name: str | None = None,
        send_signals: Sequence[Any] | None = None,
        timeout_secs: int | None = None,
        operation_id: str | None = None,
    ) -> None:
        super().__init__(lambda: asyncio.run(coro))
