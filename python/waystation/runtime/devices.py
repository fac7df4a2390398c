"""Physical devices, hosts and islands, as the runtime's machines know them.

Pure descriptions: nothing here finds a device or talks to one. What starts hosts describes them with these
classes and hands them to `resources.ResourceManager`. Invariants: names are identities, and sort; a host is
of one island; the devices of a host are numbered from 0 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from waystation._errors import InvalidInput

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, order=True)
class DeviceId:
    """A physical device.

    Attributes:
        host: Name of its host.
        index: Its number among the devices of that host.
    """

    host: str
    index: int

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> DeviceId:
        """The device that `str` shows as `text`.

        Raises:
            InvalidInput: No device is shown so.
        """
        host, separator, index = text.rpartition(":")
        if not (separator and host and index.isdecimal()):
            raise InvalidInput(f"'{text}' names no device; write 'host:index', as in 'host0:3'")
        return cls(host, int(index))


def labels(given: Mapping[str, str]) -> Labels:
    """Labels in the order in which descriptions hold them."""
    return tuple(sorted(given.items()))


@dataclass(frozen=True, slots=True)
class Host:
    """A host and its devices.

    Attributes:
        name: Its name, unique among all hosts.
        island: The island that it belongs to.
        device_count: How many devices it has.
        kind: What its devices are: `cpu`, `gpu`, …
        labels: What else requests may ask for, such as the place; see `labels`.
        device_memory_bytes: Memory of each device; None if it is not known.
    """

    name: str
    island: str
    device_count: int
    kind: str = "cpu"
    labels: Labels = ()
    device_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.name or self.device_count < 1:
            raise InvalidInput(f"host '{self.name}' needs a name and at least one device")

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """Its devices, in order."""
        return tuple(DeviceId(self.name, index) for index in range(self.device_count))

    def has_labels(self, wanted: Labels) -> bool:
        """Whether it has all of these labels, with these values."""
        return set(wanted) <= set(self.labels)


@dataclass(frozen=True, slots=True)
class Island:
    """Hosts whose devices share one mesh.

    Attributes:
        name: Its name, unique among all islands.
        hosts: Its hosts, by name.
    """

    name: str
    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        strangers = [host.name for host in self.hosts if host.island != self.name]
        if strangers:
            raise InvalidInput(f"island '{self.name}' cannot have host '{strangers[0]}' of another island")
        names = [host.name for host in self.hosts]
        if len(set(names)) != len(names):
            raise InvalidInput(f"island '{self.name}' has two hosts of one name")
        object.__setattr__(self, "hosts", tuple(sorted(self.hosts, key=lambda host: host.name)))

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """The devices of all its hosts, by host."""
        return tuple(device for host in self.hosts for device in host.devices)
