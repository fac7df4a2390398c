"""Slices as a program holds them, and their virtual devices (figure 2 of the Pathways paper).

`client.make_virtual_device_set().add_slice(devices=4).devices` are stand-ins: they name no device, and stay
valid while the slice moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from waystation._errors import InvalidInput, WrongType
from waystation.grid import Shape
from waystation.runtime.resources import Placement, SliceRequest
from waystation.runtime.tracing.arrays import abstract_mesh

if TYPE_CHECKING:
    import jax

    from waystation.runtime.client.client import Client

_AXES = ("x", "y", "z", "w")


@dataclass(frozen=True, slots=True)
class Device:
    """A virtual device.

    Attributes:
        slice: The slice that it is of.
        index: Its place in it.
    """

    slice: Slice
    index: int

    def __repr__(self) -> str:
        return f"Device(@{self.slice.number}[{self.index}])"


class Slice:
    """Devices that a client has, to run functions on.

    Args:
        client: Whose it is.
        number: Its identity.
        shape: How its devices lie in a mesh, the last axis fastest.
        axes: The names of the axes of the mesh.

    Attributes:
        client: Whose it is.
        number: Its identity.
        shape: How its devices lie.
        axes: The names of the axes of its mesh: `x`, `y`, … unless others were given.
    """

    def __init__(self, client: Client, number: int, shape: Shape, axes: tuple[str, ...]) -> None:
        self.client = client
        self.number = number
        self.shape = shape
        self.axes = axes

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in zip(self.axes, self.shape, strict=True))
        return f"Slice(@{self.number}, {mesh})"

    @property
    def device_count(self) -> int:
        """The number of its devices."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def devices(self) -> tuple[Device, ...]:
        """Its virtual devices, in the order of the mesh."""
        return tuple(Device(self, index) for index in range(self.device_count))

    @property
    def tpus(self) -> tuple[Device, ...]:
        """Its virtual devices, as the paper calls them, whatever they are."""
        return self.devices

    @property
    def mesh(self) -> jax.sharding.AbstractMesh:
        """Its mesh, without devices, to make shardings of."""
        return abstract_mesh(tuple(zip(self.axes, self.shape, strict=True)))

    @property
    def placement(self) -> Placement:
        """Where it is now.

        Raises:
            SliceNotPlaced: It has no devices.
        """
        return self.client.backend.placement(self.number)

    def remap(self, *, island: str | None = None, without_hosts: Collection[str] = ()) -> None:
        """Moves it to other devices; functions and arrays on it stay as they are for the program.

        Args:
            island: Where it has to go; by default wherever its request allows.
            without_hosts: Hosts that it has to leave.

        Raises:
            InvalidInput: It was asked for in another island, by name.
            NotEnoughDevices: There are not enough others; it stays where it is.
            SliceNotPlaced: It has no devices to move from: it is suspended, or has lost them.
        """
        self.client.flush()
        self.client.backend.remap(self.number, island=island, without_hosts=without_hosts)

    def release(self) -> None:
        """Gives it back for good."""
        self.client.flush()
        self.client.backend.release(self.number)


class DeviceSet:
    """Slices that belong together.

    Attributes:
        slices: Those that were added and not released, in order.
    """

    def __init__(self, client: Client) -> None:
        self.slices: list[Slice] = []
        self._client = client

    def add_slice(
        self,
        devices: int | None = None,
        *,
        tpu_devices: int | None = None,
        shape: Shape | None = None,
        axes: tuple[str, ...] | None = None,
        island: str | None = None,
        kind: str | None = None,
        host_labels: Mapping[str, str] | None = None,
        device_memory_bytes: int = 0,
        shared: bool = False,
    ) -> Slice:
        """Asks for devices of one island.

        Args:
            devices: How many.
            tpu_devices: The same, as the paper spells it; of any kind, unless `kind` says which.
            shape: How they lie in a mesh; by default in a row.
            axes: Names of the axes of the mesh; by default `x`, `y`, `z`, `w`.
            island: The island to take them from; None for any.
            kind: The kind of device; None for any.
            host_labels: Labels that their hosts must have.
            device_memory_bytes: Memory that each device must have.
            shared: Other slices that are shared may have the same devices.

        Raises:
            InvalidInput: The arguments contradict each other.
            NotEnoughDevices: No island has them free. One that is being rebuilt is waited for.
        """
        if devices is not None and tpu_devices is not None:
            raise InvalidInput("devices and tpu_devices are the same; give one of them")
        request = SliceRequest.of(
            tpu_devices if devices is None else devices,
            shape=shape,
            island=island,
            kind=kind,
            host_labels=host_labels,
            device_memory_bytes=device_memory_bytes,
            shared=shared,
        )
        with self._client.lock:
            if self._client.is_closed:
                raise InvalidInput("the client of this device set was closed; start another one")
        names = _AXES[: len(request.shape)] if axes is None else _names_of(axes)
        if len(set(names)) != len(request.shape):
            raise InvalidInput(
                f"a slice of shape {request.shape} needs as many different axes, not {names}; give axes=(…)"
            )
        number = self._client.backend.grant(request)
        added = Slice(self._client, number, request.shape, names)
        self.slices.append(added)
        return added

    def release(self) -> None:
        """Gives all slices back."""
        while self.slices:
            self.slices.pop().release()


def _names_of(axes: object) -> tuple[str, ...]:
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise WrongType(f"axes must be a tuple of names, not {axes!r:.60}")
    if not all(isinstance(name, str) for name in axes):
        raise WrongType(f"names of axes must be strings, not {axes!r:.60}")
    return tuple(axes)
