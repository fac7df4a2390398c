"""An island as a program has it."""

from __future__ import annotations

from waystation.runtime.cluster.connection import Connection
from waystation.runtime.cluster.status import IslandStatus
from waystation.runtime.errors import NoSuchIsland


class Island:
    """Hosts whose devices share one mesh.

    Args:
        connection: The program's.
        status: How it was when it was found.
    """

    def __init__(self, connection: Connection, status: IslandStatus) -> None:
        self._connection = connection
        self._first = status

    def __repr__(self) -> str:
        first = self._first
        return f"Island({self.name!r}, hosts={self.host_count}, devices_per_host={first.devices_per_host})"

    @property
    def name(self) -> str:
        """Its name."""
        return self._first.name

    @property
    def host_count(self) -> int:
        """How many hosts it has."""
        return len(self._first.hosts)

    @property
    def device_count(self) -> int:
        """How many devices it has, on all hosts."""
        return self.host_count * self._first.devices_per_host

    def status(self) -> IslandStatus:
        """How it is now.

        Raises:
            NoSuchIsland: It has been removed.
        """
        for status in self._connection.ask_by_ray("status").islands:
            if status.name == self.name:
                found: IslandStatus = status
                return found
        raise NoSuchIsland(f"island '{self.name}' has been removed", island=self.name)
