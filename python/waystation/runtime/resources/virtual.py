"""Virtual devices, as programs see them (figure 2 of the Pathways paper).

`make_virtual_device_set(client, granter).add_slice(devices=4).devices` are stand-ins: they hold no address
of a device, and stay valid while the slice moves. Where they are is asked of the granter each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from waystation.runtime.resources.requests import Slice, SliceRequest


class SliceGranter(Protocol):
    """Who grants slices: the `ResourceManager`, or what speaks to it from another process."""

    def grant(self, client: str, request: SliceRequest) -> Slice:
        """Grants a slice to a client."""
        ...

    def release(self, number: int) -> object:
        """Takes a slice back for good."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class VirtualDevice:
    """One device of a slice.

    Attributes:
        slice: The number of the slice.
        index: Its place among the devices of the slice.
    """

    slice: int
    index: int

    def __str__(self) -> str:
        return f"@{self.slice}[{self.index}]"


@dataclass(frozen=True, slots=True)
class VirtualSlice:
    """A slice as its client holds it.

    Attributes:
        number: Its identity.
        shape: How its devices lie in a mesh, the last axis fastest.
        devices: Its virtual devices, in that order.
    """

    number: int
    shape: tuple[int, ...]
    devices: tuple[VirtualDevice, ...]


class VirtualDeviceSet:
    """The slices of one client that belong together.

    Attributes:
        client: Whose they are.
        slices: Those that were added and not released, in order.
    """

    def __init__(self, client: str, granter: SliceGranter) -> None:
        self.client = client
        self.slices: list[VirtualSlice] = []
        self._granter = granter

    def add_slice(
        self,
        devices: int | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        island: str | None = None,
        kind: str | None = None,
        host_labels: Mapping[str, str] | None = None,
        device_memory_bytes: int = 0,
        shared: bool = False,
    ) -> VirtualSlice:
        """Asks for devices; see `SliceRequest` for what can be asked.

        Raises:
            InvalidInput: The number of devices and the shape contradict each other.
            NotEnoughDevices: No island has them free.
        """
        request = SliceRequest.of(
            devices,
            shape=shape,
            island=island,
            kind=kind,
            host_labels=host_labels,
            device_memory_bytes=device_memory_bytes,
            shared=shared,
        )
        number = self._granter.grant(self.client, request).number
        places = range(request.devices)
        added = VirtualSlice(number, request.shape, tuple(VirtualDevice(number, place) for place in places))
        self.slices.append(added)
        return added

    def release(self) -> None:
        """Gives all slices back."""
        while self.slices:
            self._granter.release(self.slices[-1].number)
            self.slices.pop()


def make_virtual_device_set(client: str, granter: SliceGranter) -> VirtualDeviceSet:
    """A set without slices."""
    return VirtualDeviceSet(client, granter)
