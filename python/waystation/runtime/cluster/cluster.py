"""A cluster as a program has it."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from waystation import _forks
from waystation._errors import InvalidInput
from waystation.runtime.client.backend import Backend
from waystation.runtime.cluster.connection import Connection
from waystation.runtime.cluster.island import Island
from waystation.runtime.cluster.status import (
    DEADLINE_S,
    HOST_CLASS,
    MAX_RESTARTS,
    ClusterStatus,
    IslandRequest,
)
from waystation.runtime.errors import NoSuchIsland
from waystation.runtime.needs import needing_packages
from waystation.runtime.suspended_state import MEMORY, MEMORY_BYTES, KeepSuspended
from waystation.runtime.timeline import Timeline

if TYPE_CHECKING:
    from waystation.runtime.client.client import Client


class Cluster:
    """A connection to a cluster; made by `connect`. Closed at the end of a `with`, by `close`, or at exit.

    Attributes:
        address: Where other programs join it.
    """

    def __init__(self, connection: Connection, address: str, on_close: Callable[[], None]) -> None:
        self.address = address
        self._connection = connection
        self._on_close = on_close
        self._lock = threading.Lock()
        self._closed = False
        self._backend: Backend | None = None
        self._started: Client | None = None
        self._host_class = HOST_CLASS
        self._owner = _forks.Owner()
        _forks.watch(self)
        atexit.register(self.close)

    def begin_in_child(self) -> None:
        """See `waystation._forks.Watched`: a child does not leave the cluster, which it is not in."""
        self._lock = threading.Lock()
        atexit.unregister(self.close)
        # Which would wait for threads of Ray's that are in the parent only, and never end.
        atexit.unregister(sys.modules["ray"].shutdown)

    def __repr__(self) -> str:
        return f"Cluster({self.address!r})"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def client(self) -> str:
        """What this program is known by there."""
        return self._connection.client

    def backend(self) -> Backend:
        """What runs programs of this client on the cluster; always the same.

        Raises:
            Unavailable: The manager has died.
        """
        connection = self._living
        with self._lock:
            if self._backend is None:
                self._backend = Backend(connection)
            return self._backend

    def start_client(self) -> Client:
        """The client of this program: slices of the cluster, functions on them, arrays.

        It is the one that is meant where none is named. The same until it is closed; then another.

        Raises:
            Unavailable: The manager has died.
        """
        with needing_packages():
            from waystation.runtime.client.client import Client
            from waystation.runtime.client.starting import current

        connection = self._living
        with self._lock:
            if self._started is None or self._started.is_closed:
                self._started = current(Client(Backend(connection)))
            return self._started

    def share(self, shares: Mapping[str, int]) -> None:
        """Divides the time of devices among programs in proportion to weights, from now on.

        Until this is called, whoever comes first runs first. Where a program has nothing to run, the others
        have all the time.

        Args:
            shares: The weight of each program, by the name that it has connected as; others have 1.

        Raises:
            InvalidInput: A weight is below 1.
        """
        self._living.ask_by_ray("share", dict(shares))

    def keep_suspended(
        self, *, memory: str = MEMORY, memory_bytes: int = MEMORY_BYTES, directory: str | None = None
    ) -> None:
        """Says where arrays of clients are kept that are suspended from now on (`Client.suspend`).

        All hosts have to reach both directories: on several machines, give those of a file system that all
        have, and no bytes of memory.

        Args:
            memory: A directory on a tmpfs: host memory that outlives the hosts' processes.
            memory_bytes: The most that arrays of all suspended clients take there.
            directory: Where those go that have no room there; by default that for temporary files.

        Raises:
            WaystationError: A directory cannot be made in one of these.
        """
        self._living.ask_by_ray("keep_suspended", KeepSuspended(memory, memory_bytes, directory))

    @property
    def islands(self) -> dict[str, Island]:
        """Its islands, by name."""
        return {status.name: Island(self._living, status) for status in self.status().islands}

    def island(self, name: str) -> Island:
        """One of its islands.

        Raises:
            NoSuchIsland: There is none of that name.
        """
        found = self.islands
        if name not in found:
            known = ", ".join(f"'{other}'" for other in sorted(found)) or "none"
            raise NoSuchIsland(f"the cluster has no island '{name}'; it has {known}", island=name)
        return found[name]

    def add_island(
        self,
        name: str,
        *,
        hosts: int = 1,
        devices_per_host: int = 1,
        kind: str = "cpu",
        labels: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
        max_restarts: int = MAX_RESTARTS,
        device_memory_bytes: int | None = None,
        spill_bytes: int = 0,
        computation_limit_s: float | None = None,
    ) -> Island:
        """Builds an island; returns when it is ready. Others go on meanwhile.

        Args:
            name: Its name.
            hosts: How many hosts it has. Each takes a CPU of the cluster, or more, except on the embedded
                one.
            devices_per_host: How many devices each has.
            kind: `cpu`, where a host makes as many devices as it is told, or `gpu`.
            labels: What else is said of it.
            deadline_s: How long a host may be silent, or do nothing of what it was told, before it counts as
                dead; in seconds. Computations, saves and loads that go on may take longer.
            max_restarts: How often it is rebuilt after the loss of a host.
            device_memory_bytes: How much arrays may take on each device; None for no limit. Programs for
                which there is no room now wait until there is, in their order.
            spill_bytes: How much of what there is no room for each host may keep in its own memory instead;
                arrays that have not been used for longest go first, and come back when they are used.
            computation_limit_s: How long a host may be at one computation, in seconds, before it counts as
                dead even if it goes on; None for no limit.

        Raises:
            Conflict: There is an island of that name.
            Unavailable: There is no room for it, or its hosts could not be built.
        """
        request = IslandRequest(
            name=name,
            hosts=hosts,
            devices_per_host=devices_per_host,
            kind=kind,
            labels=tuple(sorted((labels or {}).items())),
            deadline_s=deadline_s,
            max_restarts=max_restarts,
            host_class=self._host_class,
            device_memory_bytes=device_memory_bytes,
            spill_bytes=spill_bytes,
            computation_limit_s=computation_limit_s,
        )
        return Island(self._living, self._living.ask_by_ray("add_island", request))

    def remove_island(self, name: str) -> None:
        """Ends an island; calls that have no answer fail.

        Raises:
            NoSuchIsland: There is none of that name.
        """
        self._living.ask_by_ray("remove_island", name)

    def status(self) -> ClusterStatus:
        """How everything is now."""
        found: ClusterStatus = self._living.ask_by_ray("status")
        return found

    def record_timeline(self, is_wanted: bool = True) -> None:
        """Begins to record what the controller and all hosts do for every run, or ends that.

        It is for the whole cluster, and all of its programs. While nothing is recorded, hosts read no clock.

        Args:
            is_wanted: Whether it is to be recorded from now on.
        """
        self._living.ask_by_ray("record_timeline", is_wanted)

    def timeline(self, *, forget: bool = False) -> Timeline:
        """What was recorded until now, for all programs of the cluster.

        Args:
            forget: Begin anew afterwards.
        """
        return Timeline.of(self._living.ask_by_ray("timeline", forget))

    def write_timeline(self, path: str | Path) -> None:
        """Writes what was recorded until now as a file for https://ui.perfetto.dev or chrome://tracing."""
        self.timeline().write(path)

    def close(self) -> None:
        """Leaves the cluster; the last program to leave ends it. Once is enough, and a dead manager no error.

        In a forked child it does nothing: the parent stays in the cluster.
        """
        if not self._owner.is_here:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._on_close()

    @property
    def _living(self) -> Connection:
        if self._closed:
            raise InvalidInput("the connection to the cluster is closed; connect again")
        self._connection.require_owner()
        self._connection.require_manager()
        return self._connection
