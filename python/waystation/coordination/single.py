"""Sessions of one process, which agrees with itself; and the coordinator of a program that has no other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from waystation.coordination.base import participants


class SingleSession:
    """A session with nobody else in it. Errors are those of the functions, as they are.

    Args:
        process: The index of the process in the program.
    """

    process_index = 0
    process_count = 1
    primary = 0
    is_primary = True

    def __init__(self, process: int = 0) -> None:
        self.processes: tuple[int, ...] = (process,)

    def round(self, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Does the part, then decides."""
        return decide([work()])

    def barrier(self) -> None:
        """Everybody is here."""

    def look(self) -> None:
        """There is nobody else who could fail."""

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns."""
        return make()

    def gather(self, part: bytes) -> list[bytes] | None:
        """The only part."""
        return [part]

    def close(self) -> None:
        """Nothing was left behind."""

    def close_together(self) -> None:
        """There is nobody else."""


class SingleCoordinator:
    """Opens sessions of one process."""

    process_index = 0
    process_count = 1

    def open(
        self,
        what: str,
        *,
        deadline_s: float,
        primary: int = 0,
        sequence: str = "",
        processes: Collection[int] | None = None,
    ) -> SingleSession:
        """Opens a session; nobody can be late for it."""
        participants(what, processes, primary=primary, process_index=0, process_count=1)
        return _SESSION

    def watching(self, what: str, processes: Collection[int]) -> AbstractContextManager[Callable[[], None]]:
        """Watches nobody."""
        del what, processes
        return nullcontext(lambda: None)


_SESSION = SingleSession()
