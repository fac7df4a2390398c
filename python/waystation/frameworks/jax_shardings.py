"""Shardings as JSON, and back where the present devices allow it.

`named`: a mesh (axis names and sizes, axis types, platform and device ids) and a spec; `single`: one device;
`other`: only what it looked like, and which boxes it had. Invariants: a description names devices, never
trusts that they exist; what a file says is validated in full before JAX sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from waystation._errors import Corrupt
from waystation.grid import Box, Spread


def describe_sharding(sharding: Sharding, shape: tuple[int, ...], committed: bool = True) -> dict[str, Any]:
    """Describes a sharding of an array of `shape` in JSON values.

    Args:
        sharding: The sharding of an array.
        shape: The logical shape of that array.
        committed: False for an array that is merely where JAX puts arrays by default.
    """
    memory_kind = _memory_kind(sharding)
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return {
            "kind": "single",
            "platform": device.platform,
            "device": device.id,
            "committed": committed,
            "memory_kind": memory_kind,
        }
    spec = _describe_spec(sharding) if isinstance(sharding, NamedSharding) else None
    if spec is None:
        boxes = sorted(spread_of(sharding, shape).boxes)
        return {"kind": "other", "text": f"{type(sharding).__name__}: {sharding!r}"[:1000], "boxes": boxes}
    assert isinstance(sharding, NamedSharding)
    return {"kind": "named", "mesh": _describe_mesh(sharding.mesh), "spec": spec, "memory_kind": memory_kind}


def boxes_by_device(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The box `(offset, shape)` of each device of this process."""
    return _boxes(sharding.addressable_devices_indices_map(shape), shape)


def spread_of(sharding: Sharding, shape: tuple[int, ...]) -> Spread:
    """The boxes of all devices of all processes, with the processes that hold each."""
    holders: dict[Box, set[int]] = {}
    for device, box in _boxes(sharding.devices_indices_map(shape), shape).items():
        holders.setdefault(box, set()).add(device.process_index)
    return Spread(shape, tuple(holders), tuple(tuple(sorted(own)) for own in holders.values()))


def _boxes(indices: Mapping[Any, Any], shape: tuple[int, ...]) -> dict[Any, Box]:
    return {
        device: (
            tuple(part.start or 0 for part in index),
            tuple(
                (size if part.stop is None else part.stop) - (part.start or 0)
                for part, size in zip(index, shape, strict=True)
            ),
        )
        for device, index in indices.items()
        if index is not None
    }


def sharding_from_description(description: dict[str, Any], shape: tuple[int, ...]) -> Sharding | None:
    """Rebuilds a sharding for an array of `shape`.

    Returns:
        None if its devices are not here, or it was of a kind that is not described in full.

    Raises:
        Corrupt: No sharding could have been described like this.
    """
    _check(isinstance(description, dict), "a sharding is not an object")
    kind = description.get("kind")
    if kind == "single":
        return _single(description)
    if kind == "named":
        return _named(description, shape)
    _check(isinstance(kind, str), "a sharding has no kind")
    return None


# ---- describing --------------------------------------------------------------------------------


def _memory_kind(sharding: Sharding) -> str | None:
    """None for the default memory of the devices, whatever that is called."""
    device: Any = next(iter(sharding.device_set))
    kind = sharding.memory_kind
    return None if kind is None or kind == device.default_memory().kind else kind


def _describe_spec(sharding: NamedSharding) -> list[str | list[str] | None] | None:
    spec = sharding.spec
    if getattr(spec, "reduced", None):
        return None
    found: list[str | list[str] | None] = []
    for part in spec:
        if part is None or isinstance(part, str):
            found.append(part)
        elif isinstance(part, tuple):
            found.append(list(part))
        else:
            return None
    return found


@lru_cache(maxsize=64)
def _describe_mesh(mesh: Mesh) -> dict[str, Any]:
    devices = mesh.devices
    return {
        "axes": [[name, size] for name, size in zip(mesh.axis_names, devices.shape, strict=True)],
        "axis_types": [kind.name.lower() for kind in mesh.axis_types],
        "platform": devices.flat[0].platform,
        "devices": [device.id for device in devices.flat],
    }


# ---- rebuilding --------------------------------------------------------------------------------


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Corrupt(f"the checkpoint describes an impossible sharding: {what}")


def _single(description: dict[str, Any]) -> Sharding | None:
    number, platform = description.get("device"), description.get("platform")
    _check(type(number) is int and isinstance(platform, str), "its device is not a number of a platform")
    device = _devices(str(platform)).get(int(number or 0))
    kind = _checked_memory_kind(description)
    if device is None or not _has_memory(device, kind):
        return None
    return SingleDeviceSharding(device, memory_kind=kind)


def _named(description: dict[str, Any], shape: tuple[int, ...]) -> Sharding | None:
    mesh = description.get("mesh")
    _check(isinstance(mesh, dict), "it has no mesh")
    assert isinstance(mesh, dict)
    names, sizes = _checked_axes(mesh)
    spec = _checked_spec(description.get("spec"), dict(zip(names, sizes, strict=True)), shape)
    types = _checked_axis_types(mesh, len(names))
    kind = _checked_memory_kind(description)
    numbers = mesh.get("devices")
    _check(isinstance(numbers, list) and len(numbers) == math.prod(sizes), "its mesh lacks devices")
    assert isinstance(numbers, list)
    _check(all(type(number) is int for number in numbers), "a device is not a number")
    _check(len(set(numbers)) == len(numbers), "a device is in its mesh twice")
    platform = mesh.get("platform")  # None: the program's default, where nothing is known
    _check(platform is None or isinstance(platform, str), "its mesh has no platform")
    built = _mesh(platform, tuple(numbers), names, sizes, types)
    if built is None or not _has_memory(built.devices.flat[0], kind):
        return None
    try:
        return NamedSharding(built, spec, memory_kind=kind)
    except ValueError:  # what one version of JAX allows (mixed axis types in one part), another may not
        return None


def _checked_axes(mesh: dict[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    axes = mesh.get("axes")
    _check(isinstance(axes, list), "its mesh has no axes")
    assert isinstance(axes, list)
    for axis in axes:
        _check(isinstance(axis, list) and len(axis) == 2, "an axis is not a name and a size")
        _check(isinstance(axis[0], str) and type(axis[1]) is int and axis[1] > 0, "an axis has no size")
    names = tuple(axis[0] for axis in axes)
    _check(len(set(names)) == len(names), "two axes have one name")
    return names, tuple(axis[1] for axis in axes)


def _checked_axis_types(mesh: dict[str, Any], count: int) -> tuple[str, ...]:
    types = mesh.get("axis_types")
    _check(isinstance(types, list) and len(types) == count, "its axes lack types")
    assert isinstance(types, list)
    _check(all(kind in ("auto", "explicit", "manual") for kind in types), "an axis is of an unknown type")
    return tuple(types)


def _checked_spec(spec: Any, axes: dict[str, int], shape: Sequence[int]) -> PartitionSpec:
    _check(isinstance(spec, list) and len(spec) <= len(shape), "its spec has more parts than the array axes")
    parts: list[Any] = []
    used: list[str] = []
    for part, size in zip(spec, shape, strict=False):
        names = [] if part is None else [part] if isinstance(part, str) else part
        _check(
            isinstance(names, list) and all(isinstance(name, str) for name in names), "its spec is no spec"
        )
        _check(all(name in axes for name in names), "its spec names an axis that the mesh lacks")
        _check(size % math.prod(axes[name] for name in names) == 0, "an axis of the array cannot be split so")
        used += names
        parts.append(tuple(names) if isinstance(part, list) else part)
    _check(len(set(used)) == len(used), "its spec uses an axis twice")
    return PartitionSpec(*parts)


def _checked_memory_kind(description: dict[str, Any]) -> str | None:
    kind = description.get("memory_kind")
    _check(kind is None or isinstance(kind, str), "its memory kind is not a name")
    return kind


@lru_cache(maxsize=64)
def _mesh(
    platform: str | None,
    numbers: tuple[int, ...],
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    types: tuple[str, ...],
) -> Mesh | None:
    present = _devices(platform)
    if not set(numbers) <= present.keys():
        return None
    devices = np.empty(len(numbers), dtype=object)
    devices[:] = [present[number] for number in numbers]
    kinds = tuple(getattr(jax.sharding.AxisType, kind.capitalize()) for kind in types)
    return Mesh(devices.reshape(sizes), names, axis_types=kinds)


def _devices(platform: str | None) -> dict[int, Any]:
    try:
        return {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # no such backend here
        return {}


def _has_memory(device: Any, kind: str | None) -> bool:
    return kind is None or kind in {memory.kind for memory in device.addressable_memories()}


def over_all_devices(abstract: Any) -> Any:
    """An abstract array without a sharding as one of which every device has a copy; others as they are."""
    if not isinstance(abstract, jax.ShapeDtypeStruct) or abstract.sharding is not None:
        return abstract
    mesh = Mesh(np.asarray(jax.devices()), ("copy",))
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding)
