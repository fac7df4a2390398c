"""Works: what a client has asked for, as it waits, is dispatched, and ends; and what comes of that.

A work is what gets one place in the order of each island that it touches: a subgraph of a program, an array
to be put or fetched, a save. Its life: *held* until hosts know its lists, and the loads of what it uses and
what comes before it in its program have ended; *in line* at a scheduler; *dispatched*, which is when it has
its place; *begun* on an island as soon as its memory is there; *ended*, when every host has said so or was
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from waystation._errors import WaystationError
from waystation.runtime.messages import Fetched, HostList, Instruction, Message, Said
from waystation.runtime.objects import Handle, Reservation
from waystation.runtime.scheduling import RunKey


@dataclass(slots=True)
class HostPart:
    """What one host does for a work.

    Attributes:
        instructions: In order.
        reservation: The memory that it takes there.
    """

    instructions: tuple[Instruction, ...]
    reservation: Reservation


@dataclass(slots=True)
class IslandPart:
    """What one island does for a work.

    Attributes:
        epoch: The epoch of the island that it was made for.
        hosts: What each host does, by name.
        position: Its place among all that its client asks of this island.
        unadmitted: Hosts that have no memory for it yet, once it is dispatched.
        admitted: Hosts that have.
        moves: Spills and restores that make room for it, by host.
        unfinished: Hosts that have not said that they are done, once it has begun.
        begun: Whether hosts have been told.
        ended: Whether nothing of it is left here.
        device_seconds: The longest that a host was at it.
        overtaken: How many later works have begun before it, while it waited for memory.
    """

    epoch: int
    hosts: dict[str, HostPart]
    position: int
    unadmitted: set[str] = field(default_factory=set)
    admitted: set[str] = field(default_factory=set)
    moves: dict[str, list[Instruction]] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    begun: bool = False
    ended: bool = False
    device_seconds: float = 0.0
    overtaken: int = 0

    @property
    def handles(self) -> set[Handle]:
        """The objects that it uses and makes."""
        reservations = [host.reservation for host in self.hosts.values()]
        return {handle for each in reservations for handle in (*each.operands, *each.outputs)}


@dataclass(slots=True, eq=False)
class Work:
    """A work.

    Attributes:
        number: Its identity, never given again.
        key: Whose it is.
        fingerprint: What its cost is learned by.
        program: The name of its program, for people.
        computation: What it begins with, for people.
        parts: What each island does.
        order: If it spans islands, its place among all such works of its client.
        cost_seconds: What the client says that it takes.
        priority: Higher ones go first.
        uses: The runs that make what it uses: where one has failed, it fails alike, and does not begin.
        needs: Lists that hosts have to know first, by number; see `Prepare`.
        awaits: Loads that make what it uses and have not ended: it takes its place when they have.
        is_transfer: Whether it moves bytes between devices and storage, which takes no time of devices.
        fetched: The arrays that hosts have answered with, by host.
        said: What else hosts have answered, likewise.
        error: Why it has failed.
        on_end: Called once, when it has ended.
    """

    number: int
    key: RunKey
    fingerprint: str
    program: str
    computation: str
    parts: dict[str, IslandPart]
    order: int | None
    cost_seconds: float | None = None
    priority: int = 0
    uses: tuple[RunKey, ...] = ()
    needs: set[int] = field(default_factory=set)
    awaits: set[RunKey] = field(default_factory=set)
    is_transfer: bool = False
    fetched: dict[str, tuple[Fetched, ...]] = field(default_factory=dict)
    said: dict[str, Said] = field(default_factory=dict)
    error: WaystationError | None = None
    on_end: Callable[[Work], None] = lambda work: None

    @property
    def has_ended(self) -> bool:
        """Whether it has on all islands."""
        return all(part.ended for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Prepare:
    """Hosts are to be given lists and the functions that these call; `prepared` is to be told.

    Attributes:
        number: Of this preparation.
        island: The island.
        epoch: Of the island.
        lists: The list of each host that takes part.
        functions: Keys of the functions.
        host_calls: Those of host functions.
    """

    number: int
    island: str
    epoch: int
    lists: dict[str, HostList]
    functions: tuple[str, ...]
    host_calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForgetLists:
    """Hosts are to forget lists, which nothing that they were told to begin uses any more, and the functions
    that no other list of theirs calls.

    Attributes:
        island: The island.
        epoch: Of the island.
        lists: What the list of each host is known by.
    """

    island: str
    epoch: int
    lists: dict[str, str]


@dataclass(frozen=True, slots=True)
class Begin:
    """Hosts of an island are to be told, in the order of these effects.

    Attributes:
        island: The island.
        epoch: Of the island.
        work: What they begin, to name it.
        messages: What each of them is told.
    """

    island: str
    epoch: int
    work: Work
    messages: dict[str, Message]


@dataclass(frozen=True, slots=True)
class Release:
    """A host is to forget buffers."""

    island: str
    host: str
    handles: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """A work has failed: hosts do not wait for what others would send, nor keep what nobody will fetch.

    Attributes:
        island: The island.
        hosts: Its hosts that take part.
        work: The number of the work.
        error: Why.
        has_ended: Whether no host has anything to do for it any more.
    """

    island: str
    hosts: tuple[str, ...]
    work: int
    error: WaystationError
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Stall:
    """A work waits for memory that only clients can release; `give_up` after a while."""

    island: str
    work: int


Effect: TypeAlias = Prepare | ForgetLists | Begin | Release | Abandon | Stall
