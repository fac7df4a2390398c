"""How often a tier that fails is tried again: after each failure in a row, half as many saves are tried.

It counts saves, not seconds, so that all processes of a program leave out the same ones. What a process
tries that has seen more failures, those try as well that have seen fewer: else the turns of one whose agent
has failed once more could miss those of the others for ever, and no version would be whole.
"""

from __future__ import annotations

from dataclasses import dataclass

RAREST = 64
"""At least one save of so many is tried."""


@dataclass(slots=True)
class Pause:
    """The saves that are left out.

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
