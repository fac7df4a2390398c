"""What a run takes of a host's memory, known before it runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from waystation.runtime.ir import Copy, Exec, HostProgram, LowProgram, Recv, Send

BytesByDevice = dict[int, int]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each device of one host.

    Attributes:
        peak: The most that there is at a time, beyond what was there before the run.
        outputs: Of each value that is made and stays.
        consumed: The arguments that are freed or donated.
    """

    peak: BytesByDevice
    outputs: dict[int, BytesByDevice]
    consumed: frozenset[int]


def footprint(program: LowProgram, part: HostProgram) -> Footprint:
    """What a program takes on one of its hosts.

    A donated operand gives its bytes to the results of the call. What a `Send` offers counts until it is
    freed.
    """
    meter = _Meter(program, part.host)
    for step in part.instructions:
        if isinstance(step, Exec):
            meter.end(step.operands[place] for place in step.donated)
            meter.begin(step.results)
        elif isinstance(step, Recv | Copy):
            meter.begin((step.value,))
        elif not isinstance(step, Send):
            meter.end(step.values)
    return Footprint(dict(meter.peak), meter.made, frozenset(meter.consumed))


class _Meter:
    def __init__(self, program: LowProgram, host: str) -> None:
        self._values = {value.number: value for value in program.values}
        self._devices: defaultdict[int, list[int]] = defaultdict(list)
        for number, placement in program.placements:
            for device in placement.devices:
                if device.host == host:
                    self._devices[number].append(device.index)
        self._now: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()
        self.made: dict[int, BytesByDevice] = {}
        self.consumed: set[int] = set()

    def begin(self, numbers: tuple[int, ...]) -> None:
        """Values get memory, those that have it already excepted."""
        for number in numbers:
            if number not in self.made:
                self.made[number] = self._bytes(number)
                self._now.update(self.made[number])
        for device, used in self._now.items():
            self.peak[device] = max(self.peak[device], used)

    def end(self, numbers: Iterable[int]) -> None:
        """Values give their memory back."""
        for number in numbers:
            self._now.subtract(self._bytes(number))
            if self.made.pop(number, None) is None:
                self.consumed.add(number)

    def _bytes(self, number: int) -> BytesByDevice:
        value = self._values[number]
        return dict.fromkeys(self._devices[value.slice], value.shard_bytes)
