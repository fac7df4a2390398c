"""Recorders: one method for each thing that is stamped, and nothing else where a cluster does its work.

A recorder is off until it is switched on; then each stamp costs a clock reading and a row in a ring. Names
are written once and numbered. Kinds of rows are part of what travels, so their numbers stay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from waystation.runtime.controller.observer import Observer
from waystation.runtime.timeline.clocks import machine
from waystation.runtime.timeline.ring import CAPACITY_ROWS, Ring

if TYPE_CHECKING:
    from waystation.runtime.controller.works import Work

# Of hosts. The subject of COMPUTED is the computation, its other the number of calls that ended unseen before
# it and are in its time, its amount the device; of BROUGHT and SENT the other host, the amount bytes.
RECEIVED, BEGUN, COMPUTED, BROUGHT, SENT, ENDED = range(1, 7)
# Of the controller. The subject of SUBMITTED is the client, its other the program; of SCHEDULED, ADMITTED and
# DISPATCHED the island; the amount of COMPLETED is 1 if the work has failed.
SUBMITTED, SCHEDULED, ADMITTED, DISPATCHED, COMPLETED = range(20, 25)

_MOST_NAMES = 8_192
OTHER_NAME = "(other)"  # of all names beyond those


@dataclass(frozen=True, slots=True)
class Stamps:
    """What a recorder has that was not collected before.

    Attributes:
        machine: Where its clock is (`clocks.machine`).
        clock_ns: What that clock said when this was made.
        first: The number of the first row.
        rows: The rows (`ring.rows_of`).
        first_name: The number of the first name.
        names: Names by their numbers.
    """

    machine: str
    clock_ns: int
    first: int
    rows: bytes
    first_name: int
    names: tuple[str, ...]


class Recorder:
    """What both recorders are made of.

    Args:
        capacity: How many rows are kept until they are collected.
        clock: Nanoseconds that grow, the same for all processes of the machine.

    Attributes:
        is_on: Whether it stamps.
    """

    def __init__(self, capacity: int = CAPACITY_ROWS, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.is_on = False
        self._clock = clock
        self._ring = Ring(capacity)
        self._lock = threading.Lock()
        self._numbers = {"": 0, OTHER_NAME: 1}
        self._names = ["", OTHER_NAME]

    def now(self) -> int:
        """The time, to be given back to what ends now begun; 0 while this is off."""
        return self._clock() if self.is_on else 0

    def collect(self, after: int = 0, after_names: int = 0) -> Stamps:
        """Rows and names from these numbers on."""
        first, rows = self._ring.since(after)
        with self._lock:
            names = tuple(self._names[after_names:])
        return Stamps(machine(), self._clock(), first, rows, after_names, names)

    def _write(
        self, kind: int, work: int, subject: str = "", other: int = 0, amount: int = 0, begin_ns: int = 0
    ) -> None:
        if self.is_on:
            end_ns = self._clock()
            self._ring.write(kind, work, self._number(subject), other, amount, begin_ns or end_ns, end_ns)

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is not None:
            return number
        with self._lock:
            if name not in self._numbers:
                if len(self._names) >= _MOST_NAMES:
                    return self._numbers[OTHER_NAME]
                self._names.append(name)
                self._numbers[name] = len(self._names) - 1
            return self._numbers[name]


class HostRecorder(Recorder):
    """What a host stamps. What began while this was off is not written."""

    def __init__(self, capacity: int = CAPACITY_ROWS, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(capacity, clock)
        self._free_ns: dict[int, int] = {}  # since when each device has nothing to do

    def received(self, work: int) -> None:
        """The message of a work has come."""
        self._write(RECEIVED, work)

    def begun(self, work: int, begin_ns: int) -> None:
        """It was its turn at `begin_ns`, and what it says has been dispatched now."""
        if begin_ns:
            self._write(BEGUN, work, begin_ns=begin_ns)

    def computed(self, work: int, name: str, device: int, begin_ns: int, unseen: int) -> None:
        """A device has ended a call now, which it can have begun at `begin_ns`.

        Args:
            work: The work.
            name: The function.
            device: The number of the device in its host.
            begin_ns: When it was dispatched and the device was free.
            unseen: How many calls that ended before it could not be seen to, and are in its time.
        """
        if not self.is_on:
            return
        with self._lock:  # of two threads, too, the later one begins after the earlier one
            end_ns = self._clock()
            begin_ns = max(begin_ns, self._free_ns.get(device, 0))
            self._free_ns[device] = end_ns
        self._ring.write(COMPUTED, work, self._number(name), unseen, device, begin_ns, end_ns)

    def brought(self, work: int, host: str, size: int, begin_ns: int) -> None:
        """A block has come from another host, which was waited for since `begin_ns`."""
        if begin_ns:
            self._write(BROUGHT, work, host, amount=size, begin_ns=begin_ns)

    def sent(self, work: int, host: str, size: int, begin_ns: int) -> None:
        """A block lies ready for another host, and was read from its device since `begin_ns`."""
        if begin_ns:
            self._write(SENT, work, host, amount=size, begin_ns=begin_ns)

    def ended(self, work: int) -> None:
        """The message of a work is done."""
        self._write(ENDED, work)


class ControllerRecorder(Recorder, Observer):
    """What the controller stamps."""

    def submitted(self, work: Work) -> None:
        """See `Observer`."""
        if self.is_on:
            self._write(SUBMITTED, work.number, work.key.client, self._number(work.program))

    def scheduled(self, work: Work, island: str) -> None:
        """See `Observer`."""
        self._write(SCHEDULED, work.number, island)

    def admitted(self, work: Work, island: str) -> None:
        """See `Observer`."""
        self._write(ADMITTED, work.number, island)

    def dispatched(self, work: Work, island: str) -> None:
        """See `Observer`."""
        self._write(DISPATCHED, work.number, island)

    def completed(self, work: Work) -> None:
        """See `Observer`."""
        self._write(COMPLETED, work.number, amount=work.error is not None)
