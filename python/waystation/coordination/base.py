"""What the processes of a program need in order to act as one, and nothing about how it is carried.

A *session* is one operation that processes take part in together (a save, a load): all of the program, or
those that were named. It consists of rounds; in
each round every process does its own part, the primary looks at all parts and decides, and everybody
gets the decision. That one primitive is barrier, gather, broadcast and error propagation at once:
whoever fails, in its part or in the decision, makes every process raise the same error.

Within a session its processes are numbered from 0 on, in their order, as if the program had no others.

Invariants: the processes of a session open the same sessions of a sequence in the same order (usually there
is only one, which has no name; the same processes count as a sequence) and take part in every round of each;
a session may be used from another thread than the one that opened it, several sessions at a time; no
round waits longer than its deadline; nothing is carried by devices or by collectives of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from waystation._errors import InvalidInput


class Session(Protocol):
    """One operation of several processes.

    Attributes:
        process_index: Which of its processes this one is.
        process_count: How many they are.
        primary: Which of them decides.
        processes: For each of them the index that it has in the program, ascending.
    """

    process_index: int
    process_count: int
    primary: int
    processes: tuple[int, ...]

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
                elsewhere as ProcessFailed, naming the original type.
            Unavailable: A process has died, or has not come within the deadline: the message names it (them),
                says in which round of which operation, and what to do.
        """
        ...

    def barrier(self) -> None:
        """Waits until every process is here; a round without parts or decision."""
        ...

    def look(self) -> None:
        """Raises what another process has failed with since the last round, without waiting for any.

        For work that waits for other processes without a round.

        Raises:
            WaystationError: As `round`.
        """
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

    def close_together(self) -> None:
        """Ends the session, and waits until every other process has ended it too, or cannot be waited for: it
        is dead, late, or the deadline has passed. For what nobody may use any more when it is removed.
        """
        ...


class Coordinator(Protocol):
    """Who this process is among those of the program, and the way to open sessions."""

    process_index: int
    process_count: int

    def open(
        self,
        what: str,
        *,
        deadline_s: float,
        primary: int = 0,
        sequence: str = "",
        processes: Collection[int] | None = None,
    ) -> Session:
        """Opens the next session.

        Args:
            what: The operation and its object, such as "save '/ckpt/3'". Processes that open their n-th
                session for different things are out of step: their first round raises InvalidInput that
                shows what each wanted. The next sessions are then counted anew in all of them.
            deadline_s: How long a round may wait for the other processes, in seconds.
            primary: The index, in the program, of the process that decides.
            sequence: Names the sequence of sessions that this is the next of. Those of one sequence are
                opened in the same order in all processes; those of different ones need not be.
            processes: The indices of those that take part, which alone open it; None for all. Sessions of
                different processes are of different sequences.

        Raises:
            InvalidInput: The program has no such processes, or this one or the primary is not among them.
        """
        ...

    def watching(self, what: str, processes: Collection[int]) -> AbstractContextManager[Callable[[], None]]:
        """Watches processes while something goes on that is no session, such as a collective.

        Args:
            what: What goes on, for errors.
            processes: The indices of those that take part in it.

        Returns:
            A context with a function that raises Unavailable, which names them, if some of these have died.
            It takes seconds to notice that.
        """
        ...


def participants(
    what: str, processes: Collection[int] | None, *, primary: int, process_index: int, process_count: int
) -> tuple[int, ...]:
    """The indices of the processes that take part in a session, ascending.

    Args:
        what: The operation, for errors.
        processes: Those that were named; None for all.
        primary: The one that is to decide.
        process_index: This one.
        process_count: How many the program has.

    Raises:
        InvalidInput: The program has no such processes, or this one or the primary is not among them.
    """
    every = range(process_count)
    chosen = tuple(every) if processes is None else tuple(sorted(set(processes)))
    there = "there is only process 0"
    if process_count > 1:
        there = f"there are only processes 0 to {process_count - 1}"
    absent = [process for process in chosen if process not in every]
    if absent:
        raise InvalidInput(
            f"{what}: process {absent[0]} is to take part, but {there}; set multiprocessing.active_processes "
            "to processes of the program, or to None for all of them"
        )
    if primary not in every:
        raise InvalidInput(
            f"{what}: process {primary} is to decide, but {there}; set multiprocessing.primary_host to one "
            "of them"
        )
    for process, is_what, remedy in (
        (primary, "the primary", "set multiprocessing.primary_host to one of them"),
        (process_index, "this process", "let only these make the call"),
    ):
        if process not in chosen:
            raise InvalidInput(
                f"{what}: {is_what}, {process}, is not among multiprocessing.active_processes, which are "
                f"{list(chosen)}; {remedy}, or add it"
            )
    return chosen
