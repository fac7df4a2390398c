"""How many hosts there are, and devices on each: `2x1` are two hosts of one device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Hosts and their devices.

    Attributes:
        hosts: How many hosts.
        devices_per_host: How many devices each has.
    """

    hosts: int
    devices_per_host: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape of a text.

        Raises:
            ValueError: It is none.
        """
        hosts, devices = map(int, text.split("x"))
        if hosts < 1 or devices < 1:
            raise ValueError(f"'{text}' has no hosts, or no devices")
        return cls(hosts, devices)

    @property
    def devices(self) -> int:
        """All devices."""
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.devices_per_host}"
