"""What is asked of a cluster and what it tells of itself: plain values that travel in messages."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from waystation._errors import InvalidInput, WrongType
from waystation.runtime.resources.requests import as_count

# Pairs of a name and a value, in order.
Labels: TypeAlias = tuple[tuple[str, str], ...]

# Of Ray: where names of actors are known.
NAMESPACE = "waystation"
# What a place for a host costs. Nodes of the embedded Ray have these; elsewhere a host takes a CPU.
PLACE = "waystation_host"
DEADLINE_S = 60.0
MAX_RESTARTS = 3
# Hosts are known by the name of their island and a number, and a credential takes 255 bytes of a name.
ISLAND_NAME_BYTES = 240
HOST_CLASS = "waystation.runtime.hosts.host:Host"


def require_island_name(name: str) -> None:
    """Checks the name of an island.

    Raises:
        InvalidInput: It can be none.
    """
    if not name or "/" in name or not name.isprintable():
        raise InvalidInput(f"'{name}' is no name of an island: it must be printable, without '/'")
    if len(name.encode()) > ISLAND_NAME_BYTES:
        raise InvalidInput(
            f"the name of an island may have at most {ISLAND_NAME_BYTES} bytes, "
            f"not {len(name.encode())}: '{name:.40}…'"
        )


class IslandState(enum.StrEnum):
    """What an island is about."""

    BUILDING = "building"
    READY = "ready"
    REBUILDING = "rebuilding"
    FAILED = "failed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class IslandRequest:
    """The island that is wanted.

    Attributes:
        name: Its name.
        hosts: How many hosts it has.
        devices_per_host: How many devices each host has.
        kind: What the devices are, `cpu` or `gpu`.
        labels: What else is said of it.
        deadline_s: How long a host may be silent, or do nothing of what it was told, before it counts as
            dead; in seconds.
        max_restarts: How often it is rebuilt.
        host_class: Module and name of the class of its hosts.
        device_memory_bytes: How much arrays may take on each device; None for no limit.
        spill_bytes: How much of what does not fit each host may keep in its own memory instead.
        computation_limit_s: How long a computation may take before its host counts as dead; None for no
            limit; in seconds.
    """

    name: str
    hosts: int
    devices_per_host: int
    kind: str = "cpu"
    labels: Labels = ()
    deadline_s: float = DEADLINE_S
    max_restarts: int = MAX_RESTARTS
    host_class: str = HOST_CLASS
    device_memory_bytes: int | None = None
    spill_bytes: int = 0
    computation_limit_s: float | None = None

    def __post_init__(self) -> None:
        require_island_name(self.name)
        for what, count in (
            ("hosts", self.hosts),
            ("devices_per_host", self.devices_per_host),
            ("max_restarts", self.max_restarts),
            ("spill_bytes", self.spill_bytes),
            ("device_memory_bytes", self.device_memory_bytes or 0),
        ):
            as_count(f"{what} of island '{self.name}'", count)
        for what, seconds in (
            ("deadline_s", self.deadline_s),
            ("computation_limit_s", self.computation_limit_s or 0),
        ):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise WrongType(
                    f"{what} of island '{self.name}' must be a number of seconds, not {seconds!r:.60}"
                )
        if self.hosts < 1 or self.devices_per_host < 1:
            raise InvalidInput(
                f"island '{self.name}' needs at least one host with one device, "
                f"not {self.hosts} with {self.devices_per_host}"
            )
        if self.kind not in {"cpu", "gpu"}:
            raise InvalidInput(f"devices of island '{self.name}' cannot be '{self.kind}': use 'cpu' or 'gpu'")
        if self.deadline_s <= 0 or self.max_restarts < 0:
            raise InvalidInput(f"island '{self.name}' needs a deadline above 0 s, and 0 or more restarts")
        if self.computation_limit_s is not None and self.computation_limit_s <= 0:
            raise InvalidInput(f"island '{self.name}' needs a limit of computations above 0 s, or none")
        if (self.device_memory_bytes or 1) < 1 or self.spill_bytes < 0:
            raise InvalidInput(f"island '{self.name}' needs memory for arrays: 1 byte or more on each device")

    def host_name(self, index: int) -> str:
        """The name of one of its hosts."""
        return f"{self.name}/{index}"


@dataclass(frozen=True, slots=True)
class HostStatus:
    """A host now.

    Attributes:
        name: Its name: that of its island, and its number there.
        address: The address of its machine.
        process_id: Its process.
        devices: Its devices, as JAX shows them.
        doing: The computation that runs; empty when none does.
        ended: How many messages have ended, in this epoch.
        stalled_s: For how long there has been something to do and nothing has ended, in seconds, when it last
            reported.
        array_bytes: Bytes of arrays on its devices, likewise.
        sent_bytes: Bytes that it has sent to other hosts, likewise.
        programs: How many subgraphs of programs it keeps ready, likewise.
        functions: How many functions these call, likewise.
    """

    name: str
    address: str
    process_id: int
    devices: tuple[str, ...]
    doing: str
    ended: int
    stalled_s: float
    array_bytes: int = 0
    sent_bytes: int = 0
    programs: int = 0
    functions: int = 0


@dataclass(frozen=True, slots=True)
class IslandStatus:
    """An island now.

    Attributes:
        name: Its name.
        state: What it is about.
        epoch: How often it has been built; an island that is given the name of a removed one counts on.
        restarts: How often it has been rebuilt after a loss.
        max_restarts: How often it may be.
        kind: What its devices are.
        devices_per_host: How many each of its hosts has.
        labels: What else is said of it.
        pending: Messages that have not been answered.
        last_loss: Who was lost last, and why; empty if nobody was.
        hosts: Its hosts; none while it is being built.
    """

    name: str
    state: IslandState
    epoch: int
    restarts: int
    max_restarts: int
    kind: str
    devices_per_host: int
    labels: Labels
    pending: int
    last_loss: str
    hosts: tuple[HostStatus, ...]


@dataclass(frozen=True, slots=True)
class OwnerStatus:
    """Whose arrays take how much.

    Attributes:
        name: The name of a program, or of a shared array.
        is_shared: Whether it is a shared array.
        array_bytes: Bytes of arrays on all devices.
        pending: How many works of the program have not ended.
    """

    name: str
    is_shared: bool
    array_bytes: int
    pending: int = 0


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster now.

    Attributes:
        address: Where other programs join it.
        clients: How many programs are connected.
        islands: Its islands, by name.
        owners: Whose arrays take how much: programs, then shared arrays.
        programs: How many programs of all clients are installed.
        functions: How many functions there are, which these call or clients have registered.
    """

    address: str
    clients: int
    islands: tuple[IslandStatus, ...]
    owners: tuple[OwnerStatus, ...] = ()
    programs: int = 0
    functions: int = 0

    def document(self) -> dict[str, Any]:
        """The same in the values of JSON."""
        return asdict(self)
