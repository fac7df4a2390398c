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
from waystation._options import Options
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import Codec, DeviceArrays
from waystation.grid import volume
from waystation.layouts.opened import Destinations, Opened, Request
from waystation.transfers.buffers import Incoming, Reading

CAST_GROUP_BYTES = 512 << 20

_log = logging.getLogger("waystation")


def can_take(opened: Opened, codec: Codec, incoming: Incoming) -> bool:
    """Whether an array can go to its devices like that."""
    able = codec.devices
    return (
        able is not None
        and incoming.array is not None
        and opened.read_to_devices is not None
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
    read = reading.opened.read_to_devices
    assert read is not None, "it was asked before"
    made, requests, destinations = make(codec, arrays, reading.options)
    reading.check_cancelled()
    read(requests, destinations, reading.options, reading.progress.add, reading.statistics)
    return [_taken(reading, made, number, incoming) for number, incoming in enumerate(arrays)]


def _taken(reading: Reading, made: DeviceArrays, number: int, incoming: Incoming) -> Any:
    try:
        return made.take(number)
    except WaystationError as error:
        assert incoming.array is not None
        raise error.where(array=reading.opened.tree.labels[incoming.array])


def make(
    codec: Codec, arrays: Sequence[Incoming], options: Options
) -> tuple[DeviceArrays, list[Request], Destinations]:
    """Memory of devices for arrays, what is to be read for them, and where in that memory it goes."""
    assert codec.devices is not None, "it was asked before"
    made = codec.devices.on_devices(
        [incoming.target for incoming in arrays],
        [incoming.stored.dtype for incoming in arrays],
        casts.rule_of_loads(options),
    )
    requests: list[Request] = []
    addresses: list[int] = []
    for incoming, places in zip(arrays, made.places, strict=True):
        assert incoming.array is not None
        requests.append(Request(incoming.array, [incoming.target.boxes[number] for number, _ in places]))
        addresses += [address for _, address in places]
    return made, requests, Destinations(np.array(addresses, np.int64), made, made.regions)


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
