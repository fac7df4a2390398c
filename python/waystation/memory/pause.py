"""How often a tier that fails is tried again: after each failure in a row, twice as many saves are left out.

It counts saves, not seconds, so that all processes of a program leave out the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_LEFT_OUT = 63


@dataclass(slots=True)
class Pause:
    """The saves that are left out.

    Attributes:
        failures: How many saves have failed since the last that did not.
    """

    failures: int = 0
    _left: int = 0

    def leaves_out(self) -> bool:
        """Whether the save that is due now is one of them."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def failed(self) -> None:
        """A save has failed."""
        self.failures += 1
        self._left = min(2 ** (self.failures - 1) - 1, MOST_LEFT_OUT)

    def succeeded(self) -> None:
        """A save has not."""
        self.failures = self._left = 0
