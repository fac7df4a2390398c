"""Shardings of DTensors as JSON, and back: what was a mesh, and how it divided an array; without torch.

A mesh that was cut out of a larger one (`root["tp"]`) has its like in other processes, and all of them hold
the same arrays: the description lists the processes of each, one after another. Invariants: a description
names processes, never trusts that they exist; what a file says is validated in full before torch sees it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation._errors import Corrupt
from waystation.frameworks.torch_shards import Split
from waystation.grid import Shape

KIND = "dtensor"


@dataclass(frozen=True, slots=True)
class MeshDescription:
    """A device mesh in plain values.

    Attributes:
        device_type: Of its devices.
        shape: Of one mesh.
        axis_names: None if its axes have no names.
        ranks: The processes, of each copy of the mesh in the order of its elements.
        process_count: How many processes the program had.
    """

    device_type: str
    shape: Shape
    axis_names: tuple[str, ...] | None
    ranks: tuple[int, ...]
    process_count: int

    def copies(self) -> NDArray[np.int64]:
        """The processes, as an array of meshes."""
        return np.array(self.ranks, dtype=np.int64).reshape(-1, *self.shape)

    def to_json(self) -> dict[str, Any]:
        """In JSON values."""
        return {
            "device_type": self.device_type,
            "shape": list(self.shape),
            "axis_names": None if self.axis_names is None else list(self.axis_names),
            "ranks": list(self.ranks),
            "process_count": self.process_count,
        }

    def __str__(self) -> str:
        names = self.axis_names or [f"axis {number}" for number in range(len(self.shape))]
        axes = ", ".join(f"{name}={size}" for name, size in zip(names, self.shape, strict=True))
        return f"a mesh ({axes}) of {self.device_type} devices in a program of {self.process_count} processes"


def describe(mesh: dict[str, Any], splits: Sequence[Split | None]) -> dict[str, Any]:
    """Describes a sharding; `mesh` is what `MeshDescription.to_json` made."""
    return {"kind": KIND, "mesh": mesh, "placements": [_describe_split(split) for split in splits]}


def is_dtensor(description: dict[str, Any] | None) -> bool:
    """Whether a stored array was a DTensor."""
    return description is not None and description.get("kind") == KIND


def parse(description: dict[str, Any], shape: Shape) -> tuple[MeshDescription, tuple[Split | None, ...]]:
    """The mesh of a described DTensor of `shape`, and how each of its axes divides the array.

    Raises:
        Corrupt: No DTensor could have been described like this.
    """
    mesh = description.get("mesh")
    _check(isinstance(mesh, dict), "it has no mesh")
    assert isinstance(mesh, dict)
    parsed = _parse_mesh(mesh)
    placements = description.get("placements")
    _check(isinstance(placements, list), "it has no placements")
    assert isinstance(placements, list)
    _check(len(placements) == len(parsed.shape), "there is not one placement for each axis of the mesh")
    return parsed, tuple(_parse_split(placement, len(shape)) for placement in placements)


# ---- the parts ---------------------------------------------------------------------------------


def _describe_split(split: Split | None) -> list[str | int]:
    if split is None:
        return ["replicate"]
    return ["shard", split.axis] if split.pieces == 1 else ["strided_shard", split.axis, split.pieces]


def _parse_split(placement: Any, rank: int) -> Split | None:
    _check(isinstance(placement, list) and bool(placement), "a placement is no list")
    kind, numbers = placement[0], placement[1:]
    _check(all(type(number) is int for number in numbers), "a placement has something that is no number")
    if kind == "replicate" and not numbers:
        return None
    _check((kind, len(numbers)) in (("shard", 1), ("strided_shard", 2)), "a placement is of no known kind")
    split = Split(*numbers)
    _check(0 <= split.axis < rank and split.pieces > 0, "a placement divides an axis that the array lacks")
    return split


def _parse_mesh(mesh: dict[str, Any]) -> MeshDescription:
    device_type, count = mesh.get("device_type"), mesh.get("process_count")
    _check(isinstance(device_type, str), "its mesh has no type of device")
    _check(type(count) is int, "its mesh is of a program without processes")
    shape, ranks = _numbers(mesh, "shape"), _numbers(mesh, "ranks")
    size = math.prod(shape)
    _check(bool(shape) and size > 0, "its mesh has no processes")
    _check(bool(ranks) and len(ranks) % size == 0, "its mesh lacks processes")
    assert type(count) is int
    _check(all(0 <= rank < count for rank in ranks), "its mesh has a process that the program had not")
    _check(len(set(ranks)) == len(ranks), "a process is in its mesh twice")
    names = mesh.get("axis_names")
    if names is not None:
        _check(isinstance(names, list) and len(names) == len(shape), "the axes of its mesh lack names")
        assert isinstance(names, list)
        _check(all(isinstance(name, str) for name in names), "the name of an axis is no string")
        _check(len(set(names)) == len(names), "two axes have one name")
    # Only by their names can meshes be cut out of a larger one.
    _check(names is not None or len(ranks) == size, "its mesh has copies, but its axes have no names")
    return MeshDescription(str(device_type), shape, None if names is None else tuple(names), ranks, count)


def _numbers(mesh: dict[str, Any], name: str) -> tuple[int, ...]:
    values = mesh.get(name)
    _check(isinstance(values, list), f"its mesh has no {name}")
    assert isinstance(values, list)
    _check(all(type(value) is int and value >= 0 for value in values), f"the {name} of its mesh is no number")
    return tuple(values)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Corrupt(f"the checkpoint describes an impossible DTensor: {what}")
