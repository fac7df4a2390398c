"""Which physical devices there are, which slices use them, and which are the best for another.

The choice is the paper's: load is balanced statically, by spreading slices over all devices. Of the devices
that a request accepts, those with the fewest slices are taken, on the least used hosts first, so that a slice
touches few hosts. Invariants: a device that a one-to-one slice uses has no other user; the choice depends on
descriptions and uses only, never on the order in which hosts were added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from waystation._errors import Conflict, NotFound
from waystation.runtime.devices import DeviceId, Host, Island
from waystation.runtime.resources.requests import Assignment, SliceRequest

_Rank = tuple[int, int, float, str]


class DevicePool:
    """The devices of all islands and who uses them."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._users: dict[DeviceId, dict[int, Assignment]] = {}

    def add(self, host: Host) -> None:
        """Adds the devices of a host.

        Raises:
            Conflict: There is a host of that name.
        """
        if host.name in self._hosts:
            raise Conflict(f"host '{host.name}' is there already; remove it first, or give it another name")
        self._hosts[host.name] = host
        self._users.update((device, {}) for device in host.devices)

    def remove(self, name: str) -> set[int]:
        """Removes a host; returns the slices that used its devices.

        Raises:
            NotFound: There is no such host.
        """
        host = self._hosts.pop(name, None)
        if host is None:
            raise NotFound(f"there is no host '{name}'; there are {sorted(self._hosts)}")
        return {slice_number for device in host.devices for slice_number in self._users.pop(device)}

    def islands(self) -> tuple[Island, ...]:
        """All islands that have hosts, by name."""
        members: dict[str, list[Host]] = {}
        for _, host in sorted(self._hosts.items()):
            members.setdefault(host.island, []).append(host)
        return tuple(Island(name, tuple(hosts)) for name, hosts in sorted(members.items()))

    def users(self, device: DeviceId) -> frozenset[int]:
        """The slices that use a device; none of one that is not here."""
        return frozenset(self._users.get(device, ()))

    def take(self, number: int, devices: Iterable[DeviceId], assignment: Assignment) -> None:
        """Notes that a slice uses devices."""
        for device in devices:
            self._users[device][number] = assignment

    def give_back(self, number: int, devices: Iterable[DeviceId]) -> None:
        """Notes that a slice no longer uses devices, of which some may be gone."""
        for device in devices:
            self._users.get(device, {}).pop(number, None)

    def choose(
        self,
        request: SliceRequest,
        *,
        without_hosts: Collection[str] = (),
        rather_not: Collection[DeviceId] = (),
    ) -> tuple[str, tuple[DeviceId, ...]] | None:
        """The best devices for a request.

        Args:
            request: What is asked for.
            without_hosts: Hosts that must not take part.
            rather_not: Devices that are taken only if others do not suffice.

        Returns:
            The island and its devices, by host and number; None if no island has enough.
        """
        found: list[tuple[_Rank, tuple[DeviceId, ...]]] = []
        for island in self.islands():
            hosts = [
                host for host in island.hosts if host.name not in without_hosts and request.accepts(host)
            ]
            host_loads = {host.name: self._load(host.devices) for host in hosts}
            ranked = sorted(
                (device in rather_not, len(self._users[device]), host_loads[device.host], device)
                for host in hosts
                for device in host.devices
                if self._is_free(device, request.assignment)
            )[: request.devices]
            if len(ranked) == request.devices:
                unwanted = sum(entry[0] for entry in ranked)
                rank = (unwanted, max(entry[1] for entry in ranked), self._load(island.devices), island.name)
                found.append((rank, tuple(sorted(entry[3] for entry in ranked))))
        if not found:
            return None
        rank, devices = min(found)
        return rank[3], devices

    def describe_free(self, request: SliceRequest) -> str:
        """What each island has for a request, for people."""
        parts = []
        for island in self.islands():
            fitting = [device for host in island.hosts if request.accepts(host) for device in host.devices]
            free = sum(self._is_free(device, request.assignment) for device in fitting)
            parts.append(f"island '{island.name}' has {free} free of {len(fitting)} that fit")
        return ", ".join(parts) or "there are no hosts"

    def _is_free(self, device: DeviceId, assignment: Assignment) -> bool:
        users = self._users[device].values()
        return not users or (assignment is Assignment.SHARED and Assignment.ONE_TO_ONE not in users)

    def _load(self, devices: tuple[DeviceId, ...]) -> float:
        """The mean number of slices of these devices."""
        return sum(len(self._users[device]) for device in devices) / len(devices)
