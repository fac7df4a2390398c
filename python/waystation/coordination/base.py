"""What the processes of a program need in order to act as one, and nothing about how it is carried.

A *session* is one operation that all processes take part in (a save, a load). It consists of rounds; in
each round every process does its own part, the primary looks at all parts and decides, and everybody
gets the decision. That one primitive is barrier, gather, broadcast and error propagation at once:
whoever fails, in its part or in the decision, makes every process raise the same error.

Invariants: all processes open the same sessions of a sequence in the same order (usually there is only one,
which has no name) and take part in every round of each;
a session may be used from another thread than the one that opened it, several sessions at a time; no
round waits longer than its deadline; nothing is carried by devices or by collectives of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Session(Protocol):
    """One operation of all processes.

    Attributes:
        process_index: Which of the processes this one is.
        process_count: How many they are.
        primary: The index of the process that decides.
    """

    process_index: int
    process_count: int
    primary: int

    @property
    def is_primary(self) -> bool:
        """Whether this process decides."""
        ...

    def round(self, work: Callable[[], bytes], decide: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Does this process's part, has the primary decide, and returns the decision.

        Args:
            work: This process's part. What it returns is carried to the primary.
            decide: Called in the primary alone, with the parts of all processes by their index. What it
                returns is carried to all.

        Raises:
            WaystationError: Any process's part, or the decision, failed. A process whose own part failed
                raises that error as it is; all others raise an error of the same class and message, whose
                context has `process` and whose notes have the traceback of that process. Of several errors
                the first that the primary saw is everybody's. Errors that are no WaystationError arrive
                elsewhere as Internal, naming the original type.
            Unavailable: A process has died, or has not come within the deadline: the message names it (them),
                says in which round of which operation, and what to do.
        """
        ...

    def barrier(self) -> None:
        """Waits until every process is here; a round without parts or decision."""
        ...

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns in the primary, in which alone it is called."""
        ...

    def gather(self, part: bytes) -> list[bytes] | None:
        """The parts of all processes by their index in the primary, None elsewhere."""
        ...

    def close(self) -> None:
        """Ends the session; frees what its rounds left behind. Also after an error; idempotent."""
        ...


class Coordinator(Protocol):
    """Who this process is among those of the program, and the way to open sessions."""

    process_index: int
    process_count: int

    def open(self, what: str, *, deadline_s: float, primary: int = 0, sequence: str = "") -> Session:
        """Opens the next session.

        Args:
            what: The operation and its object, such as "save '/ckpt/3'". Processes that open their n-th
                session for different things are out of step: their first round raises InvalidInput that
                shows what each wanted.
            deadline_s: How long a round may wait for the other processes, in seconds.
            primary: The index of the process that decides.
            sequence: Names the sequence of sessions that this is the next of. Those of one sequence are
                opened in the same order in all processes; those of different ones need not be.
        """
        ...
