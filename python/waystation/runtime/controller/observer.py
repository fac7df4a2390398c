"""Who is told when works come from one state to the next. The controller has no clock; an observer may."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waystation.runtime.controller.works import Work


class Observer:
    """One that looks away. What a work that has failed leaves out is not told."""

    def submitted(self, work: Work) -> None:
        """A work has come."""

    def scheduled(self, work: Work, island: str) -> None:
        """It has its place in the order of an island."""

    def admitted(self, work: Work, island: str) -> None:
        """It is first in line there, and has its memory."""

    def dispatched(self, work: Work, island: str) -> None:
        """What its hosts are told has been made."""

    def completed(self, work: Work) -> None:
        """It has ended on all islands, or has failed."""
