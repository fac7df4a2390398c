"""What the next save to memory does, as all processes of a program agree in one round.

Each process knows what it would have to do (`SaveAction`), and all do what comes last in the order of
actions. So all processes leave out the same steps: no version lacks a shard because one process has left it
out, and no process waits in a session that another does not open.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from waystation.coordination import Session

RAREST = 64
"""At least one save of so many is tried."""


class SaveAction(enum.IntEnum):
    """What a save does; of the actions of several processes the greatest counts."""

    SAVE = 0
    """It saves the step."""
    ASK = 1
    """It asks the agents whether they can take versions again."""
    GO_BACK = 2
    """It begins an epoch, since the step is not newer than the last one."""
    OPEN = 3
    """It opens the tier, which has not been possible before."""
    PAUSE = 4
    """It leaves the step out, since saves have failed."""
    BUSY = 5
    """It leaves the step out, since what was begun before has not ended."""

    @property
    def leaves_out(self) -> bool:
        """Whether nothing is begun."""
        return self >= SaveAction.PAUSE

    def agreed(self, session: Session) -> Self:
        """The action of all processes, given that of this one."""

        def decide(parts: Sequence[bytes]) -> bytes:
            return b"%d" % max(map(int, parts))

        return type(self)(int(session.round(lambda: b"%d" % self, decide)))


@dataclass(slots=True)
class Pause:
    """Which saves are left out after failures: after each in a row, half as many are tried.

    It counts saves, not seconds, so that processes with as many failures leave out the same ones. Every save
    that a process with more failures tries is also tried by those with fewer. A save is made if all try it,
    so saves are as frequent as the process with the most failures tries them.

    Attributes:
        failures: How many saves have failed since the last that did not.
    """

    failures: int = 0
    _due: int = 0

    def leaves_out(self) -> bool:
        """Whether the save that is due now is one of them."""
        self._due += 1
        return self._due % min(1 << max(self.failures - 1, 0), RAREST) != 0

    def failed(self) -> None:
        """A save has failed."""
        self.failures += 1

    def succeeded(self) -> None:
        """A save has not."""
        self.failures = 0
