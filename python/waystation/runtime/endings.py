"""What waits for the end of something that has begun. Whoever waits sees by its type what it can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Ending(ABC):
    """Waits for the end of something, and says whether it would have to.

    Whatever else can be called waits too, and cannot be asked.
    """

    @abstractmethod
    def __call__(self) -> Any:
        """Waits for the end; returns what has come of it."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether there is nothing to wait for, as far as that can be seen."""


class TransferEnding(ABC):
    """Waits for the end of something that moves bytes between devices and storage, for which nothing else has
    to wait."""

    @abstractmethod
    def __call__(self) -> Any:
        """Waits for the end; returns what has come of it."""

    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """Bytes that have been moved, and bytes to move as far as they are known."""
