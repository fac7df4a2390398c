"""Loggers of saves and restores."""

from __future__ import annotations

import abc
from typing import Any

from waystation.training.logger import StandardLogger

__all__ = ["AbstractLogger", "CompositeLogger", "StandardLogger"]


class AbstractLogger(abc.ABC):
    """Is told of each save and restore."""

    @abc.abstractmethod
    def log_entry(self, entry: Any) -> None:
        """Takes one entry."""


class CompositeLogger(AbstractLogger):
    """Tells several loggers.

    Args:
        loggers: The loggers.
    """

    def __init__(self, *loggers: Any) -> None:
        self._loggers = loggers

    def log_entry(self, entry: Any) -> None:
        """Takes one entry."""
        for logger in self._loggers:
            logger.log_entry(entry)
