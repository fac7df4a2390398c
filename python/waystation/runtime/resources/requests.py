"""What a client asks for, and what it has then: requests, slices, placements.

A slice is a set of *virtual devices*, which programs are written against; its placement says which physical
devices they are now. Invariants: virtual devices of one slice are different physical devices of one island;
the epoch of a placement grows with every change, so that what was lowered for an older one can be told.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, SupportsIndex

from waystation._errors import InvalidInput, WrongType
from waystation.runtime.devices import DeviceId, Host, Labels, labels


def as_count(what: str, value: object) -> int:
    """A number of something, as a plain int.

    Raises:
        WrongType: It is no integer.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise WrongType(f"{what} must be an integer, not {value!r:.60}")
    return operator.index(value)


class Assignment(Enum):
    """How a slice has its devices.

    Attributes:
        ONE_TO_ONE: Each physical device is one virtual device and no other.
        SHARED: Slices that are all shared may have a device in common; programs then take turns.
    """

    ONE_TO_ONE = "one_to_one"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class SliceRequest:
    """What a slice has to be.

    Attributes:
        devices: How many virtual devices.
        shape: How they lie in a mesh, the last axis fastest.
        island: The island to take them from; None for any.
        kind: The kind of device; None for any.
        labels: Labels that their hosts must have; see `devices.labels`.
        device_memory_bytes: Memory that each device must have. Hosts that do not tell theirs have enough.
        assignment: Whether the devices may be shared.
    """

    devices: int
    shape: tuple[int, ...]
    island: str | None = None
    kind: str | None = None
    labels: Labels = ()
    device_memory_bytes: int = 0
    assignment: Assignment = Assignment.ONE_TO_ONE

    @classmethod
    def of(
        cls,
        devices: int | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        island: str | None = None,
        kind: str | None = None,
        host_labels: Mapping[str, str] | None = None,
        device_memory_bytes: int = 0,
        shared: bool = False,
    ) -> SliceRequest:
        """A request by the number of devices, their shape, or both.

        Raises:
            InvalidInput: Neither is given, both contradict each other, or an extent is below 1.
        """
        devices = None if devices is None else as_count("the number of devices of a slice", devices)
        if shape is None:
            if devices is None:
                raise InvalidInput("a slice needs a number of devices or a shape: add_slice(devices=4)")
            shape = (devices,)
        given: Any = shape
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise WrongType(f"the shape of a slice must be a tuple of integers, not {given!r:.60}")
        shape = tuple([as_count("an extent of a slice", extent) for extent in shape])
        count = math.prod(shape)
        if any(extent < 1 for extent in shape) or devices not in (None, count):
            asked = "" if devices is None else f", asked for are {devices}"
            raise InvalidInput(f"a slice of shape {shape} has {count} devices{asked}; extents are 1 or more")
        assignment = Assignment.SHARED if shared else Assignment.ONE_TO_ONE
        wanted = labels(host_labels or {})
        return cls(count, shape, island, kind, wanted, device_memory_bytes, assignment)

    def accepts(self, host: Host) -> bool:
        """Whether devices of this host are what is asked for."""
        memory = host.device_memory_bytes
        return (
            self.island in (None, host.island)
            and self.kind in (None, host.kind)
            and host.has_labels(self.labels)
            and (memory is None or memory >= self.device_memory_bytes)
        )

    def __str__(self) -> str:
        parts = [
            f"{self.devices} {self.kind or ''}".strip() + (" device" if self.devices == 1 else " devices")
        ]
        if self.island is not None:
            parts.append(f"of island '{self.island}'")
        parts += [f"with {name}={value}" for name, value in self.labels]
        if self.device_memory_bytes:
            parts.append(f"with {self.device_memory_bytes} bytes each")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the virtual devices of a slice are.

    Attributes:
        epoch: Grows with every placement of that slice, from 1 on.
        island: The island of the devices.
        devices: The physical device of each virtual one.
    """

    epoch: int
    island: str
    devices: tuple[DeviceId, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that take part, by name."""
        return tuple(sorted({device.host for device in self.devices}))


class SliceState(Enum):
    """Whether a slice can be used.

    Attributes:
        PLACED: It has physical devices.
        WAITING: It lost devices, and no others were free; it gets the next that fit.
        SUSPENDED: Its devices were taken back until its client is resumed.
    """

    PLACED = "placed"
    WAITING = "waiting"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice as it was when it was asked for; a newer `Slice` replaces it when something changes.

    Attributes:
        number: Its identity, never given to another.
        client: Whose it is.
        request: What it has to be.
        state: Whether it can be used.
        placement: Where it is; of a slice that has no devices, where it was last.
    """

    number: int
    client: str
    request: SliceRequest
    state: SliceState
    placement: Placement


@dataclass(frozen=True, slots=True)
class SliceChanged:
    """A slice was placed, moved, suspended, left without devices or released.

    Attributes:
        slice: The slice as it is now.
        released: It is no more.
    """

    slice: Slice
    released: bool = False
