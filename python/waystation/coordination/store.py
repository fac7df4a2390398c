"""What sessions need of a key-value store, and what they keep in it.

Several frameworks bring a small store that lives in one of the processes (its *host*) and that all reach by
network. A `Store` is such a store, made to look the same everywhere; `store_session` builds sessions on it.

Under `waystation/<generation>/<numbering>/<session>/<round>/` are, for a process p:

=====================  ===================================================================================
`part/<p>`             what p did in this round (in the first one with what it believes the session is for)
`arrived`              how many have handed in their part
`ready`                put once: by the last to arrive, or by the first to fail
`verdict`              put once: the decision, or the first error; it ends the round for everybody
`pieces/<p>/<i>`       a part that is too large for one message
`pieces/verdict/<i>`   likewise the decision
`wanted`               put once, in a first round that takes long: what one process wants
`looking`              put once: by the process that wants something else, and tells all
=====================  ===================================================================================

Whoever fails puts the verdict itself, so that nobody waits for processes that are slow, be it the primary.
As it is put once only, all processes get the same one, also when several fail, or the primary decides while
another gives up waiting. A process with a verdict has no more to do in the round.

**Processes out of step** made different calls: what they want in the first round of a session differs. The
primary sees that once all have come. Earlier, each process that has waited for a second compares what it
wants with `wanted`, so that two of them do not wait for a third that is slow. A process may also find that a
session has failed in a call that it has not made. Whoever notices puts the error at `<numbering>/ended`, with
the number of the session, and as the verdict of the session. Each process that reads either opens its next
session as number 0 of the next numbering. Those that wait for the first round of a later session look for
`ended` too. It stays, and so does what there is of later sessions, which not all processes have opened.

**Who removes what.** When all parts of a round are there, everybody has read the verdict of the round before,
and the primary removes what there is of that one. In a store that removes only key by key, this is its
verdict, and what counted the arrivals is removed at once; each process removes its own part once it knows the
verdict: the primary has then read all parts, or will not use them. What is left is that of the last rounds,
which nobody knows to be the last until sessions close: `closed` counts these, and the last one out removes
the rest. Where the store would vanish with its host, the host waits for that moment (`over`),
or others could not read the last verdict. If a process dies, it never closes, and what that session left
stays: a few small keys, in a store that will hardly outlive that death for long.

**Generations.** A store may outlive the group of processes that uses it (torch elastic keeps one for all
restarts of a group). Each process counts in the store how often it began to coordinate here.

**Costs.** In a round without failure a process other than the primary makes three calls (part, arrival,
verdict), a fourth if it is the last, and one more (removal) where removal is key by key; the primary makes
three more, of which one reads all parts at once. Only values too large for a message, and waiting for long,
cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Store(Protocol):
    """A key-value store that all processes reach, and what is known there of who still runs.

    Safe to use from several threads at once: a call that waits delays no other. Values are never empty. Every
    method raises Unavailable that names the host if the store does not answer.

    Attributes:
        message_bytes: The most that one value may have.
        longest_wait_s: How long one call of `get` may wait, as deaths and interrupts are looked for between.
        host: The process with which the store vanishes, whether or not the others are done; None if it
            stays until all are.
        removes_below: Whether `delete` of a key also removes all those that are below it.
    """

    message_bytes: int
    longest_wait_s: float
    host: int | None
    removes_below: bool

    def set(self, key: str, value: bytes) -> None:
        """Puts a value, in place of an earlier one."""
        ...

    def set_once(self, key: str, value: bytes) -> bool:
        """Puts a value if there is none yet; returns whether it did."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 at first, and returns the sum. Such keys are read in no other way."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, waiting for it to be put; None if it was not in time. With no time it does not wait."""
        ...

    def read(self, directory: str, names: Sequence[str]) -> list[bytes | None]:
        """The values of `directory/name` for each name, in few calls, without waiting; None where there
        is none. The directory holds no other keys, at no depth."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys; those that are not there are no error."""
        ...

    def join(self, prefix: str, process_index: int) -> None:
        """Called once, before any session begins: this process is the one of that index; what is kept of who
        runs has keys that begin with the prefix."""
        ...

    def begin(self, watched: Sequence[int]) -> bool:
        """A session begins, which has to know if one of these processes dies; returns whether it is the only
        one that is open."""
        ...

    def end(self, watched: Sequence[int]) -> bool:
        """It has ended; returns whether it was the last that was open."""
        ...

    def dead(self, processes: Sequence[int]) -> dict[int, str]:
        """Those of the watched processes that have died, each with how that is known."""
        ...

    def note_failure(self, dead: Sequence[int]) -> None:
        """A round has failed, and these processes are known to have died, or none is known to this process;
        the framework is to end without waiting for the dead."""
        ...

    def describe(self, process: int) -> str:
        """The process for people: `process 2 (pid 4711 on host a)`."""
        ...
