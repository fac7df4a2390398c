"""A bounded ring of rows of plain integers: what was written last, and how much of what came before is gone.

Invariants: a row is whole or not there; the number of a row is its place among all that were ever written;
memory is taken once, with the first row.
"""

from __future__ import annotations

import struct
import threading
from typing import NamedTuple

CAPACITY_ROWS = 65_536


class Row(NamedTuple):
    """One stamp.

    Attributes:
        kind: What happened, one of the kinds of `recorder`.
        work: The number of the work for which it did.
        subject: What it was about, the number of a name.
        other: What else, likewise.
        amount: A count, of what the kind says.
        begin_ns: When it began, by the clock of who wrote it, in nanoseconds.
        end_ns: When it ended, likewise.
    """

    kind: int
    work: int
    subject: int
    other: int
    amount: int
    begin_ns: int
    end_ns: int


_LAYOUT = struct.Struct("<7q")
ROW_BYTES = _LAYOUT.size


class Ring:
    """Rows, written by any thread.

    Args:
        capacity: How many are kept.
    """

    def __init__(self, capacity: int = CAPACITY_ROWS) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._rows = bytearray()
        self._written = 0

    def write(self, *row: int) -> None:
        """Writes one row, over the oldest when the ring is full."""
        with self._lock:
            if not self._rows:
                self._rows = bytearray(self._capacity * ROW_BYTES)
            _LAYOUT.pack_into(self._rows, self._written % self._capacity * ROW_BYTES, *row)
            self._written += 1

    def since(self, number: int) -> tuple[int, bytes]:
        """Rows from a number on: the number of the first that is still there, and their bytes."""
        with self._lock:
            first = min(max(number, self._written - self._capacity), self._written)
            begin, end = first % self._capacity, self._written % self._capacity
            if first == self._written:
                return first, b""
            if begin < end:
                return first, bytes(self._rows[begin * ROW_BYTES : end * ROW_BYTES])
            return first, bytes(self._rows[begin * ROW_BYTES :] + self._rows[: end * ROW_BYTES])


def rows_of(encoded: bytes) -> list[Row]:
    """The rows in bytes of a ring."""
    return [Row(*values) for values in _LAYOUT.iter_unpack(encoded)]
