"""The memory of one host's devices: who gets in, in order, and what goes to host memory to make room.

A pure machine, one for each host. What drives it: a `Reservation` for each run, in the order of the island
(`request`), what ends (`finish`, `free`), what is there from elsewhere (`put`), and who has waited too long
(`give_up`). What it emits, to be carried out in this order: `Spill` and `Restore` of an object's shards on
this host, `Admit` of a run. `Refuse` says that a run can never fit, as soon as that is known, `Stalled` that
only clients who hold objects can make room: whoever drives this tells them, and gives up at a deadline, so
that nothing waits in silence.

Invariants: on each device what is resident and what is reserved never exceeds the budget, nor what is spilled
the host's; runs are admitted in order, unless `overtake` is called; what an admitted run uses is resident
until it ends.

Why this cannot deadlock. All hosts see one order. Of the runs that have not ended take the first: on every
host all before it have ended, so nothing is reserved and nothing is pinned by another, and it is admitted
wherever what objects hold, less what can be spilled, leaves room. Where it does not, it is refused or
reported as stalled, and ends. An admitted run never waits for memory again. A run may overtake others only
where it is admitted on all its hosts at once (`can_be_admitted`): so it holds nothing while it waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from waystation.runtime.errors import DeviceMemoryExceeded
from waystation.runtime.objects.footprint import BytesByDevice
from waystation.runtime.objects.table import Handle
from waystation.runtime.scheduling import RunKey


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a run needs on this host.

    Attributes:
        run: The run.
        peak: The most bytes on each device at a time, beyond its operands; see `footprint`.
        operands: The objects that it uses.
        consumed: Those of them that end with it.
        outputs: The objects that it leaves, with their bytes on each device; the peak includes them.
    """

    run: RunKey
    peak: BytesByDevice
    operands: tuple[Handle, ...] = ()
    consumed: tuple[Handle, ...] = ()
    outputs: Mapping[Handle, BytesByDevice] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spill:
    """The shards of an object on this host go to host memory."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Restore:
    """The shards of an object on this host come back from host memory."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class Admit:
    """A run has its memory."""

    run: RunKey


@dataclass(frozen=True, slots=True)
class Refuse:
    """A run gets no memory, and ends.

    Attributes:
        run: The run.
        error: Why.
    """

    run: RunKey
    error: DeviceMemoryExceeded


@dataclass(frozen=True, slots=True)
class Stalled:
    """A run waits for objects to be released, with nothing else running.

    Attributes:
        run: The run.
        holders: The objects that fill the devices on which it lacks memory, the largest first.
    """

    run: RunKey
    holders: tuple[Handle, ...]


Decision: TypeAlias = Spill | Restore | Admit | Refuse | Stalled


class HostMemory:
    """The budgets of one host.

    Attributes:
        host: Its name.
        device_budgets: Bytes of each device.
        spill_budget: Bytes of host memory for objects that are spilled.
    """

    def __init__(self, host: str, device_budgets: BytesByDevice, spill_budget: int = 0) -> None:
        self.host = host
        self.device_budgets: dict[int, int] = dict(device_budgets)
        self.spill_budget = spill_budget
        self._resident: dict[Handle, BytesByDevice] = {}  # the least recently used first
        self._spilled: dict[Handle, BytesByDevice] = {}
        self._pins: Counter[Handle] = Counter()
        self._used: Counter[int] = Counter()
        self._running: dict[RunKey, Reservation] = {}
        self._waiting: deque[Reservation] = deque()
        self._doomed: set[Handle] = set()
        self._stalled: RunKey | None = None
        self._overtakers: set[RunKey] = set()  # of those that are running

    @property
    def used_bytes(self) -> BytesByDevice:
        """What is resident or reserved on each device."""
        return {device: self._used[device] for device in self.device_budgets}

    @property
    def spilled_bytes(self) -> int:
        """What is in host memory."""
        return sum(sum(own.values()) for own in self._spilled.values())

    def put(self, handle: Handle, held: BytesByDevice) -> None:
        """An object has come from elsewhere than a run, into memory that was free."""
        self._resident[handle] = held
        self._used.update(held)

    def request(self, reservation: Reservation) -> list[Decision]:
        """A run is the next in the order of the island."""
        if self._never_fits(reservation):
            return [self._refusal(reservation)]
        self._waiting.append(reservation)
        return list(self._admit())

    def can_be_admitted(self, run: RunKey) -> bool:
        """Whether there is memory for a run that waits, wherever it is in line."""
        return self._victims(self._waiting_of(run)) is not None

    def overtake(self, run: RunKey) -> list[Decision]:
        """Admits a run before those ahead of it; it can be admitted."""
        reservation = self._waiting_of(run)
        victims = self._victims(reservation)
        assert victims is not None, "it can be admitted"
        self._waiting.remove(reservation)
        self._overtakers.add(run)
        return [*self._take(reservation, victims), *self._admit()]

    def waits_for_clients(self, run: RunKey) -> bool:
        """Whether a run that waits would lack memory even if nothing was running any more."""
        reservation = self._waiting_of(run)
        ending = {handle for each in self._running.values() for handle in each.consumed} | self._doomed
        at_rest = Counter[int]()
        for handle, held in self._resident.items():
            if handle not in ending and handle not in reservation.operands:
                at_rest.update(held)
        for each in self._running.values():
            for held in each.outputs.values():
                at_rest.update(held)
        need = self._need(reservation)
        lack = sum(
            max(0, need[device] + at_rest[device] - budget) for device, budget in self.device_budgets.items()
        )
        return lack > max(0, self.spill_budget - self.spilled_bytes)

    def is_stalled(self, run: RunKey) -> bool:
        """Whether a run that waits was reported as stalled, and still is."""
        return self._stalled == run

    def finish(self, run: RunKey, *, failed: bool = False) -> list[Decision]:
        """An admitted run is over; if it failed, it leaves nothing."""
        reservation = self._running.pop(run)
        self._overtakers.discard(run)
        self._used.subtract(reservation.peak)
        self._pins -= Counter(reservation.operands)
        self._doomed.update(reservation.consumed)
        if not failed:
            for handle, held in reservation.outputs.items():
                self.put(handle, held)
        self._sweep()
        return list(self._admit())

    def free(self, handle: Handle) -> list[Decision]:
        """An object has ended; runs that are here and use it, or make it, finish first."""
        self._doomed.add(handle)
        self._sweep()
        return list(self._admit())

    def give_up(self, run: RunKey) -> list[Decision]:
        """A run has waited too long: it is refused, and those behind it are looked at."""
        for reservation in self._waiting:
            if reservation.run == run:
                self._waiting.remove(reservation)
                self._sweep()
                return [self._refusal(reservation), *self._admit()]
        return []

    # ---- how ------------------------------------------------------------------------------------

    def _admit(self) -> Iterator[Decision]:
        while self._waiting:
            head = self._waiting[0]
            victims = self._victims(head)
            if victims is not None:
                self._waiting.popleft()
                yield from self._take(head, victims)
            elif self._never_fits(head):
                self._waiting.popleft()
                self._sweep()
                yield self._refusal(head)
            else:
                # What has overtaken it goes on for ever, maybe, and is not what it waits for.
                is_alone = self._running.keys() <= self._overtakers
                waits = not self._running or (is_alone and self.waits_for_clients(head.run))
                if waits and not self.is_stalled(head.run):
                    yield Stalled(head.run, self._holders(self._lack(head)))
                self._stalled = head.run if waits else None
                return

    def _waiting_of(self, run: RunKey) -> Reservation:
        return next(each for each in self._waiting if each.run == run)

    def _never_fits(self, head: Reservation) -> bool:
        return any(need > self.device_budgets[device] for device, need in self._need(head).items())

    def _need(self, head: Reservation) -> Counter[int]:
        """Bytes on each device with nothing there but the run and its operands."""
        need = Counter(head.peak)
        for handle in set(head.operands):
            need.update(self._resident.get(handle) or self._spilled.get(handle) or {})
        return need

    def _lack(self, head: Reservation) -> BytesByDevice:
        """How many bytes a run lacks on each device, with its operands back from host memory."""
        wanted = Counter(head.peak)
        for handle in set(head.operands) & self._spilled.keys():
            wanted.update(self._spilled[handle])
        free = {device: budget - self._used[device] for device, budget in self.device_budgets.items()}
        return {device: wanted[device] - free[device] for device in free if wanted[device] > free[device]}

    def _victims(self, head: Reservation) -> list[Handle] | None:
        """The least recently used objects that make room when they are spilled; None if none do."""
        lack = self._lack(head)
        left = Counter(lack)
        room = self.spill_budget - self.spilled_bytes
        chosen = []
        for handle, held in self._resident.items():
            helps = any(left[device] > 0 and held.get(device, 0) for device in lack)
            size = sum(held.values())
            if helps and size <= room and not self._pins[handle] and handle not in head.operands:
                chosen.append(handle)
                room -= size
                left.subtract(held)
        return chosen if all(left[device] <= 0 for device in lack) else None

    def _take(self, head: Reservation, victims: list[Handle]) -> Iterator[Decision]:
        for handle in victims:
            self._spilled[handle] = self._resident.pop(handle)
            self._used.subtract(self._spilled[handle])
            yield Spill(handle)
        for handle in head.operands:
            if handle in self._spilled:
                self.put(handle, self._spilled.pop(handle))
                yield Restore(handle)
            elif handle in self._resident:  # now the most recently used
                self._resident[handle] = self._resident.pop(handle)
            self._pins[handle] += 1
        self._used.update(head.peak)
        self._running[head.run] = head
        yield Admit(head.run)

    def _sweep(self) -> None:
        """Drops the objects that have ended and that nothing here uses or makes any more."""
        present = [*self._running.values(), *self._waiting]
        needed = {handle for each in present for handle in (*each.operands, *each.outputs)}
        for handle in sorted(self._doomed - needed):
            self._used.subtract(self._resident.pop(handle, {}))
            self._spilled.pop(handle, None)
            self._doomed.discard(handle)

    def _holders(self, lack: BytesByDevice) -> tuple[Handle, ...]:
        sizes = {
            handle: sum(held.get(device, 0) for device in lack) for handle, held in self._resident.items()
        }
        return tuple(
            sorted((handle for handle in sizes if sizes[handle]), key=lambda each: (-sizes[each], each))
        )

    def _refusal(self, reservation: Reservation) -> Refuse:
        lack, need = self._lack(reservation), self._need(reservation)
        device = max(self.device_budgets, key=lambda each: (lack.get(each, 0), need[each]))
        holders = [str(handle) for handle in self._holders({device: 0})[:5]]
        held = f"; objects {', '.join(holders)} hold the most" if holders else ""
        return Refuse(
            reservation.run,
            DeviceMemoryExceeded(
                f"run {reservation.run.run} of '{reservation.run.client}' needs {need[device]} bytes on "
                f"device {self.host}:{device} of {self.device_budgets[device]}, and lacks "
                f"{lack.get(device, 0)}{held}; release objects, use more devices, or allow more host memory",
                host=self.host,
            ),
        )
