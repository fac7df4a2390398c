"""The coordinator of a program of one process: what it says is agreed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from waystation._errors import InvalidInput


class SingleSession:
    """A session with nobody else in it. Errors are those of the functions, as they are."""

    process_index = 0
    process_count = 1
    primary = 0
    is_primary = True

    def round(self, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Does the part, then decides."""
        return decide([work()])

    def barrier(self) -> None:
        """Everybody is here."""

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns."""
        return make()

    def gather(self, part: bytes) -> list[bytes] | None:
        """The only part."""
        return [part]

    def close(self) -> None:
        """Nothing was left behind."""


class SingleCoordinator:
    """Opens sessions of one process."""

    process_index = 0
    process_count = 1

    def open(self, what: str, *, deadline_s: float, primary: int = 0, sequence: str = "") -> SingleSession:
        """Opens a session; nobody can be late for it."""
        if primary != 0:
            raise InvalidInput(
                f"{what}: process {primary} is to decide, but there is only process 0; "
                "set multiprocessing.primary_host to 0"
            )
        return _SESSION


_SESSION = SingleSession()
