"""A block that does not raise: whatever goes wrong in it is told to somebody instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType


class Degrading(AbstractContextManager[None, bool]):
    """Such a block. What ends the program, or a thread, passes through.

    Args:
        on_failure: Is told.
        passes: Errors of these classes are raised all the same.
    """

    def __init__(
        self, on_failure: Callable[[Exception], object], passes: tuple[type[Exception], ...] = ()
    ) -> None:
        self._on_failure = on_failure
        self._passes = passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._passes):
            return False
        self._on_failure(error)
        return True
