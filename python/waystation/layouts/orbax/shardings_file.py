"""`_sharding`: how JAX arrays were sharded, by their name in URL-safe base 64; each is JSON in a string.

In memory a sharding is a description as the codec of JAX makes them (`frameworks/jax_shardings.py`). The file
says less: no platform of the devices of a mesh, no kind of memory, and nothing at all of shardings other than
over a mesh or of one device.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from waystation._errors import Corrupt
from waystation.layouts.orbax.json_files import dump, parse_object, reading, require, shape, text

Description = dict[str, Any]

_NAMED, _SINGLE = "NamedSharding", "SingleDeviceSharding"
_AXIS_TYPE = "AxisType."
# `cpu:0`, before JAX 0.10 `TFRT_CPU_0`; `TPU_3(process=0,(1,1,0,0))`; `cuda:0`.
_DEVICE = re.compile(r"(?:TFRT_)?(?P<platform>[A-Za-z]+)[_:](?P<number>\d{1,18})(?:\(.*\))?")
_GPU_BACKENDS = frozenset({"cuda", "rocm"})  # of one platform, as JAX has it


def encode(shardings: Mapping[str, Description | None]) -> bytes:
    """The bytes of the file, of descriptions by the names of arrays; what it cannot say is left out."""
    body = {}
    for name, description in shardings.items():
        value = None if description is None else _to_json(description)
        if value is not None:
            body[base64.urlsafe_b64encode(name.encode()).decode()] = json.dumps(value)
    return dump(body)


def _to_json(description: Description) -> dict[str, Any] | None:
    if description["kind"] == "single":
        platform = "cuda" if description["platform"] == "gpu" else description["platform"]
        return {"sharding_type": _SINGLE, "device_str": f"{platform}:{description['device']}"}
    if description["kind"] != "named":
        return None
    mesh = description["mesh"]
    sizes = [size for _, size in mesh["axes"]]
    devices = np.empty(len(mesh["devices"]), object)
    devices[:] = [{"id": number} for number in mesh["devices"]]
    return {
        "sharding_type": _NAMED,
        "shape": sizes,
        "axis_names": [name for name, _ in mesh["axes"]],
        "axis_types": [_AXIS_TYPE + kind.capitalize() for kind in mesh["axis_types"]],
        "partition_spec": description["spec"],
        "device_mesh": {"mesh": devices.reshape(sizes).tolist()},
    }


def decode(data: bytes, path: str) -> dict[str, Description]:
    """Reads the bytes of the file: descriptions by the names of arrays. Devices need not exist.

    Raises:
        Corrupt: They are not such a file.
    """
    found = {}
    for encoded, value in parse_object(data, path).items():
        with reading(path):
            name = _name(encoded)
            if not value:
                continue  # as written for a sharding that Orbax could not describe
            body = parse_object(text(value), path)
            description = _from_json(body)
            if description is not None:
                found[name] = description
    return found


def _name(encoded: str) -> str:
    try:
        return base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True).decode()
    except binascii.Error as error:
        raise ValueError(f"a name is not in base 64: {error}") from error


def _from_json(body: dict[str, Any]) -> Description | None:
    kind = body["sharding_type"]
    if kind == _SINGLE:
        return _single(body)
    if kind == _NAMED:
        return _named(body)
    require(isinstance(kind, str), "a sharding has no type")
    return {"kind": "other", "text": kind[:1000], "boxes": []}


def _single(body: dict[str, Any]) -> Description | None:
    match = _DEVICE.fullmatch(text(body["device_str"]))
    if match is None:
        return None  # a name of a device that only the program that saved knows
    platform = match["platform"].lower()
    return {
        "kind": "single",
        "platform": "gpu" if platform in _GPU_BACKENDS else platform,
        "device": int(match["number"]),
        "committed": True,
        "memory_kind": None,
    }


def _named(body: dict[str, Any]) -> Description:
    sizes, names = shape(body["shape"]), body["axis_names"]
    require(isinstance(names, list) and len(names) == len(sizes), "a mesh has other axes than names")
    count = math.prod(sizes)
    mesh = body.get("device_mesh")
    return {
        "kind": "named",
        "mesh": {
            "axes": [[text(name), size] for name, size in zip(names, sizes, strict=True)],
            "axis_types": _axis_types(body.get("axis_types"), len(names)),
            "platform": None,  # the program's default
            "devices": _device_range(count) if mesh is None else _devices(mesh["mesh"], sizes),
        },
        "spec": _spec(body["partition_spec"]),
        "memory_kind": None,
    }


def _axis_types(value: Any, count: int) -> list[str]:
    if not value:
        return ["auto"] * count
    require(isinstance(value, list) and len(value) == count, "a mesh has other axes than types of axes")
    return [text(kind).removeprefix(_AXIS_TYPE).lower() for kind in value]


def _device_range(count: int) -> list[int]:
    """Where no devices are named, Orbax takes all that there are."""
    require(count <= 1 << 20, "a mesh has more devices than there could be")
    return list(range(count))


def _devices(value: Any, sizes: tuple[int, ...]) -> list[int]:
    """The numbers of devices in lists nested as deep as the mesh has axes."""
    level = [value]
    for size in sizes:
        require(
            all(isinstance(inner, list) and len(inner) == size for inner in level),
            "a mesh has other devices than sizes",
        )
        level = [device for inner in level for device in inner]
    numbers = [device["id"] for device in level]
    require(all(type(number) is int for number in numbers), "a device is no number")
    return numbers


def _spec(value: Any) -> list[str | list[str] | None]:
    require(isinstance(value, list), "a partition spec is no list")
    found: list[str | list[str] | None] = []
    for part in value:
        fits = part is None or isinstance(part, str) or all(isinstance(name, str) for name in part)
        require(fits, "a partition spec names no axes")
        found.append(part)
    return found


def fitting(description: Description | None, rank: int, path: str) -> Description | None:
    """The sharding of an array of `rank` axes, where that of its storage has more: PRNG keys are stored with
    axes of words behind their own.

    Raises:
        Corrupt: It shards along an axis that the array has not.
    """
    spec = None if description is None else description.get("spec")
    if description is None or spec is None or len(spec) <= rank:
        return description
    if any(part for part in spec[rank:]):
        raise Corrupt(f"'{path}' shards an array along axes that it does not have", path=path)
    return {**description, "spec": spec[:rank]}
