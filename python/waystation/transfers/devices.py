"""Arrays that the engine brings to their devices itself.

It reads to pinned memory and copies from there while it reads on, so that storage and bus are busy at the
same time, and no array is in host memory as a whole. What is cast there is read in the stored dtype, in
groups. Invariants: beside the arrays, a device holds one group of at most `CAST_GROUP_BYTES`, or one array;
what the layers below cannot do so goes through host memory, as everything else does.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from waystation import _native
from waystation._errors import WaystationError
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import Codec, DeviceArrays
from waystation.grid import volume
from waystation.layouts.native.destinations import Destinations
from waystation.layouts.native.read import Request
from waystation.layouts.opened import Opened
from waystation.transfers.buffers import Incoming, Reading, label_of

CAST_GROUP_BYTES = 512 << 20

_log = logging.getLogger("waystation")


def can_take(opened: Opened, codec: Codec, incoming: Incoming) -> bool:
    """Whether an array can go to its devices like that."""
    able = codec.devices
    return (
        able is not None
        and incoming.array is not None
        and hasattr(opened, "read_to_devices")
        and tuple(incoming.stored.shape) == tuple(incoming.target.shape)
        and able.goes_to_devices(incoming.target, incoming.stored.dtype)
        and _has_devices()
    )


@functools.cache
def _has_devices() -> bool:
    """Whether the engine finds the devices that a framework has; if not, says why once."""
    try:
        if _native.devices():
            return True
        reason = "there is no CUDA driver, or it shows no device"
    except WaystationError as error:
        reason = error.message
    _log.warning("arrays go to GPUs through host memory, which takes longer: %s", reason)
    return False


def load(
    reading: Reading, codec: Codec, arrays: Sequence[Incoming]
) -> Iterator[tuple[list[Incoming], list[Any]]]:
    """Loads arrays that can be taken: yields some, and what was made of them, until all are there."""
    for group in _groups(arrays):
        yield group, load_group(reading, codec, group)


def load_group(reading: Reading, codec: Codec, arrays: Sequence[Incoming]) -> list[Any]:
    """Loads arrays in one job."""
    made, requests, destinations = _made(reading, codec, arrays)
    reading.read_to_devices(requests, destinations)
    return [_taken(reading, made, number, incoming) for number, incoming in enumerate(arrays)]


def _taken(reading: Reading, made: DeviceArrays, number: int, incoming: Incoming) -> Any:
    try:
        return made.take(number)
    except WaystationError as error:
        assert incoming.array is not None
        raise error.where(array=label_of(reading.opened, incoming.array))


def _made(
    reading: Reading, codec: Codec, arrays: Sequence[Incoming]
) -> tuple[DeviceArrays, list[Request], Destinations]:
    """Memory of devices for arrays, what is to be read for them, and where in that memory it goes."""
    assert codec.devices is not None, "it was asked before"
    made = codec.devices.on_devices(
        [incoming.target for incoming in arrays],
        [incoming.stored.dtype for incoming in arrays],
        casts.rule_of_loads(reading.options),
    )
    requests: list[Request] = []
    addresses: list[int] = []
    for incoming, places in zip(arrays, made.places, strict=True):
        assert incoming.array is not None
        requests.append(Request(incoming.array, [incoming.target.boxes[number] for number, _ in places]))
        addresses += [address for _, address in places]
    return made, requests, Destinations(np.array(addresses, np.int64), made, made.regions)


class Bringing:
    """Arrays on their way to devices in one job, each to be had as soon as it is there, whatever is still to
    come. All but `wait` are called by one thread.

    Args:
        reading: How they are read; what is opened tells of each tensor when it is in place.
        codec: What makes them.
        arrays: They; none is cast.
    """

    def __init__(self, reading: Reading, codec: Codec, arrays: Sequence[Incoming]) -> None:
        self._opened: Any = reading.opened
        self._arrays = arrays
        self._made, requests, destinations = _made(reading, codec, arrays)
        self._arriving = reading.start_to_devices(requests, destinations)

    def take(self, place: int) -> Any:
        """One of the arrays, by its place among them, once all of it is on its devices."""
        self._arriving.wait_for(self._opened.tensors_of(self._arrays[place].array))
        return self._made.take(place)

    def wait(self) -> None:
        """Returns once nothing of it is read any more, however that ended."""
        self._arriving.wait()

    def finish(self) -> None:
        """Ends it, once all arrays have been taken."""
        self._arriving.finish()

    def close(self) -> None:
        """Ends it at any time; no memory is written to afterwards."""
        self._arriving.close()


def _groups(arrays: Sequence[Incoming]) -> Iterator[list[Incoming]]:
    """What is wanted as it is stored, all at once; then the rest, as the bound allows."""
    plain = [incoming for incoming in arrays if incoming.is_plain]
    if plain:
        yield plain
    group: list[Incoming] = []
    held = 0
    for incoming in arrays:
        if incoming.is_plain:
            continue
        nbytes = _stored_bytes(incoming)
        if group and held + nbytes > CAST_GROUP_BYTES:
            yield group
            group, held = [], 0
        group.append(incoming)
        held += nbytes
    if group:
        yield group


def _stored_bytes(incoming: Incoming) -> int:
    """What its boxes take before they are cast."""
    form = dtypes.of_stored(incoming.stored)
    items = sum(volume(box) for box in incoming.target.boxes)
    return items * int(form.host.itemsize) * math.prod(form.host_trailing)
