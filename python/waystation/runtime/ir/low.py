"""The low form of a program: for each host the list of what it does, in order.

Values are those of the high form; on a host a value is its shards on the devices of that host. Arguments are
there before the first instruction, and what is returned stays after the last. A `Send` offers bytes and goes
on, so what is freed after it must outlive the offer; a `Recv` waits for them; what stays on one host is a
`Copy`. A host runs its list in order, and lists of all hosts follow one order of nodes, so they cannot wait
for each other in a circle. Transfers are numbered within one run of one list: a transport adds which run it
is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from waystation.grid import Box
from waystation.runtime.ir.program import Value
from waystation.runtime.ir.text import extents, quoted
from waystation.runtime.resources import Placement


@dataclass(frozen=True, slots=True)
class Exec:
    """A call on the devices of one host.

    Attributes:
        node: Its place in the program that was expanded, the same on all hosts.
        kind: `compute` or `host_call`.
        function: The hash of the function.
        slice: The slice, whose placement has the order of devices in the mesh.
        devices: The devices of this host that take part.
        operands: The values that it uses.
        results: The values that it makes.
        donated: Places of operands whose memory it takes over.
    """

    node: int
    kind: str
    function: str
    slice: int
    devices: tuple[int, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    donated: tuple[int, ...]

    def __str__(self) -> str:
        words = [self.kind, quoted(self.function), f"@{self.slice}", extents(self.devices)]
        words.append(f"({_values(self.operands)})")
        words += [f"donates ({', '.join(map(str, self.donated))})"] * bool(self.donated)
        return f"{' '.join(words)} -> ({_values(self.results)})"


@dataclass(frozen=True, slots=True)
class Send:
    """A box of a shard is offered to another host.

    Attributes:
        kind: The word for it.
        transfer: The number of the transfer in this program; one `Recv` has the same.
        value: The value.
        device: The device whose shard has the box.
        box: Which elements, counted within the whole array.
        host: Who gets them.
    """

    kind: ClassVar[str] = "send"
    transfer: int
    value: int
    device: int
    box: Box
    host: str

    def __str__(self) -> str:
        return f"send {self.transfer} %{self.value}[{self.device}] {_box(self.box)} to {quoted(self.host)}"


@dataclass(frozen=True, slots=True)
class Recv:
    """A box comes from another host, for the shards of some devices.

    Attributes:
        kind: The word for it.
        transfer: The number of the transfer.
        value: The value that is made.
        devices: The devices whose shards get the box.
        box: Which elements, counted within the whole array.
        host: Who sends them.
    """

    kind: ClassVar[str] = "recv"
    transfer: int
    value: int
    devices: tuple[int, ...]
    box: Box
    host: str

    def __str__(self) -> str:
        place = f"%{self.value}{extents(self.devices)}"
        return f"recv {self.transfer} {place} {_box(self.box)} from {quoted(self.host)}"


@dataclass(frozen=True, slots=True)
class Copy:
    """A box goes from a shard to others of the same host.

    Attributes:
        kind: The word for it.
        source: The value that has it.
        device: The device whose shard has it.
        value: The value that is made.
        devices: The devices whose shards get it.
        box: Which elements, counted within the whole array.
    """

    kind: ClassVar[str] = "copy"
    source: int
    device: int
    value: int
    devices: tuple[int, ...]
    box: Box

    def __str__(self) -> str:
        place = f"%{self.value}{extents(self.devices)}"
        return f"copy %{self.source}[{self.device}] to {place} {_box(self.box)}"


@dataclass(frozen=True, slots=True)
class Free:
    """The shards of values on this host are freed.

    Attributes:
        kind: The word for it.
        values: The values.
    """

    kind: ClassVar[str] = "free"
    values: tuple[int, ...]

    def __str__(self) -> str:
        return f"free ({_values(self.values)})"


Instruction: TypeAlias = Exec | Send | Recv | Copy | Free


@dataclass(frozen=True, slots=True)
class HostProgram:
    """What one host does.

    Attributes:
        host: The host.
        instructions: In order.
    """

    host: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class LowProgram:
    """What all hosts do.

    Attributes:
        name: The program's name.
        values: All values, for their shapes and shardings.
        placements: Where the slices are.
        hosts: The list of each host, by name.
        transfer_count: Transfers are numbered from 0 to this.
    """

    name: str
    values: tuple[Value, ...]
    placements: tuple[tuple[int, Placement], ...]
    hosts: tuple[HostProgram, ...]
    transfer_count: int

    def on(self, host: str) -> HostProgram:
        """What one host does: nothing if it takes no part."""
        return next((part for part in self.hosts if part.host == host), HostProgram(host, ()))


def show_low(program: LowProgram) -> str:
    """The text of a program in the low form."""
    lines = [f"low {quoted(program.name)} {{"]
    for part in program.hosts:
        lines += [f"  host {quoted(part.host)} {{", *(f"    {each}" for each in part.instructions), "  }"]
    return "\n".join([*lines, "}\n"])


def _values(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"%{number}" for number in numbers)


def _box(box: Box) -> str:
    return " ".join(f"{begin}:{begin + extent}" for begin, extent in zip(*box, strict=True)) or "scalar"
