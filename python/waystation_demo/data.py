"""Real text that is on every machine, cut into batches in an order that can be resumed.

The text is the source code of Python's standard library, one byte a token. The order is a function of
the seed and of how many windows were drawn before, so a resumed program draws the windows that the
interrupted one would have drawn next. Nothing here keeps a state of its own: the position belongs to
the training state, where a checkpoint holds it together with the weights.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

VOCABULARY = 256
LEAST_TEXT_BYTES = 100_000


def standard_library_text(directory: Path | None = None) -> npt.NDArray[np.uint8]:
    """The top-level modules of the standard library, one after another in order of their names."""
    source = directory or Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(source.glob("*.py")))
    if len(text) < LEAST_TEXT_BYTES:
        raise SystemExit(
            f"the demo trains on the sources of Python's standard library, but {str(source)!r} holds only "
            f"{len(text)} bytes of .py files; use an interpreter that ships its sources"
        )
    return np.frombuffer(text, np.uint8)


class Windows:
    """Cuts a text into windows of equal length and hands them out in a shuffled order, pass after pass."""

    def __init__(self, text: npt.NDArray[np.uint8], length: int, seed: int) -> None:
        count = len(text) // length
        self._windows = text[: count * length].reshape(count, length)
        self._seed = seed
        self._order_of_pass: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def batch(self, position: int, size: int) -> npt.NDArray[np.int32]:
        """The `size` windows that follow the first `position` ones."""
        rows = [self._row(index) for index in range(position, position + size)]
        return self._windows[rows].astype(np.int32)

    def _row(self, index: int) -> int:
        number, place = divmod(index, len(self._windows))
        if number != self._order_of_pass[0]:
            shuffled = np.random.default_rng([self._seed, number]).permutation(len(self._windows))
            self._order_of_pass = (number, shuffled)
        return int(self._order_of_pass[1][place])
