"""What one host does for a program, prepared once and run often.

Nothing here touches data: a `LoadedList` says which arrays a list needs, how they lie, which of them end in
it, and starts to compile what it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from waystation.frameworks.jax_public import Device
from waystation.runtime.devices import DeviceId
from waystation.runtime.execution.assembly import Lying
from waystation.runtime.execution.exchange import Expected
from waystation.runtime.execution.functions import Function, Functions, Place
from waystation.runtime.ir import Exec, Instruction, LowProgram, Recv, Send, Value
from waystation.runtime.ir.low import Free

FindDevice = Callable[[DeviceId], Device]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a list.

    Attributes:
        list: The key that the list was loaded by.
        run: The number of the run, which is never used again; transfers are named by it.
        arguments: A value of the program, and the handle that has it, for each value that is there before.
        results: A value, and its new handle, for each value that stays. A value may have several.
    """

    list: str
    run: int
    arguments: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]


class LoadedList:
    """The list of one host.

    Args:
        program: A low program, which may have the list of this host only.
        host: The host.
        find_device: The JAX device of each device of its slices, those of other hosts too.
        functions: What it calls.

    Attributes:
        name: The name of the program.
        instructions: What is done, in order.
        values: Values by number.
        devices: The devices of each slice that has some here.
        donated: Values whose memory is taken over.
        ended: Values that are given up in this list in any way.
        expected: What it receives.
        is_quick: Whether nothing of it waits for other hosts, or for functions of programs.
        makers: The call that makes each value that one makes.
        compiled: The functions of its calls that have been waited for, by the identity of the instruction.
        places: What it calls that is to be compiled; it holds that until it is forgotten.
    """

    donated: frozenset[int]
    ended: frozenset[int]

    def __init__(self, program: LowProgram, host: str, find_device: FindDevice, functions: Functions) -> None:
        self.name: str = program.name
        self.instructions: tuple[Instruction, ...] = program.on(host).instructions
        self.values: dict[int, Value] = {value.number: value for value in program.values}
        self.devices: dict[int, tuple[Device, ...]] = {}
        self._local: dict[int, dict[int, int]] = {}
        for number, placement in program.placements:
            here = {
                device.index: place for place, device in enumerate(placement.devices) if device.host == host
            }
            if here:  # of slices on other islands there are no devices of JAX here
                self.devices[number] = tuple(find_device(device) for device in placement.devices)
                self._local[number] = dict(sorted(here.items(), key=lambda pair: pair[1]))
        self._lying: dict[int, Lying] = {}
        self.donated, self.ended = self._given_up()
        self.compiled: dict[int, Function] = {}
        self.expected: tuple[Expected, ...] = tuple(self._to_expect())
        calls = [step for step in self.instructions if isinstance(step, Exec)]
        self.is_quick: bool = not self.expected and all(step.kind == "compute" for step in calls)
        self.makers: dict[int, Exec] = {number: step for step in calls for number in step.results}
        self.places: frozenset[Place] = frozenset(
            (step.function, self.devices[step.slice], step.donated)
            for step in calls
            if step.kind == "compute"
        )
        functions.hold(self.places)

    def _to_expect(self) -> Iterator[Expected]:
        phase = 0
        for step in self.instructions:
            if isinstance(step, Recv):
                dtype = self.values[step.value].dtype
                yield Expected(step.transfer, step.host, step.box[1], dtype, phase)
            elif isinstance(step, Exec | Send):
                phase += 1

    def is_here(self, number: int) -> bool:
        """Whether this host has shards of a value."""
        return bool(self._local.get(self.values[number].slice))

    def lying(self, number: int) -> Lying:
        """How a value lies on the devices of its slice."""
        if number not in self._lying:
            value = self.values[number]
            self._lying[number] = Lying(value, self.devices[value.slice], self._local[value.slice])
        return self._lying[number]

    def _given_up(self) -> tuple[frozenset[int], frozenset[int]]:
        donated: set[int] = set()
        freed: set[int] = set()
        for step in self.instructions:
            if isinstance(step, Free):
                freed.update(step.values)
            elif isinstance(step, Exec):
                donated.update(step.operands[place] for place in step.donated)
        return frozenset(donated), frozenset(freed | donated)
