"""A stream of bytes as whole lines, as people are to see them."""

from __future__ import annotations

from collections.abc import Callable

# A program that never ends its line (a progress bar) is shown what it has written by then.
LONGEST_LINE_BYTES = 1 << 16


class Lines:
    """Cuts a stream of bytes into lines.

    Args:
        on_line: Takes each line, without its end.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._begun = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes; none at the end."""
        *whole, self._begun = (self._begun + data).split(b"\n")
        for line in whole:
            self._give(line)
        if self._begun and (not data or len(self._begun) > LONGEST_LINE_BYTES):
            self._give(self._begun)
            self._begun = b""

    def _give(self, line: bytes) -> None:
        # Of a line that was written over, what was seen last.
        shown = line.removesuffix(b"\r").rpartition(b"\r")[2]
        self._on_line(shown.decode(errors="replace"))
