"""How an array was sharded when it was saved, as metadata show it: also where its devices are not here.

The classes and their attributes are those that Orbax shows as `sharding_metadata` of an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from waystation._errors import InvalidInput
from waystation.frameworks.jax_shardings import sharding_from_description


@dataclass(frozen=True)
class DeviceMetadata:
    """A device of a mesh.

    Attributes:
        id: Its number.
    """

    id: int


@dataclass(frozen=True)
class DeviceMetadataMesh:
    """The devices of a mesh.

    Attributes:
        mesh: Nested lists of them, in the shape of the mesh.
    """

    mesh: Sequence[Any]


@dataclass(frozen=True, eq=False)
class ShardingMetadata:
    """A sharding by its description in a checkpoint; two are equal if they describe the same."""

    _description: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingMetadata) and self._description == other._description

    def __hash__(self) -> int:
        return hash(repr(self._description))

    def _rebuilt(self, kind: type[Sharding]) -> Any:
        rank = len(self._description.get("spec", ()))
        # The parts of an axis need no particular size here: 0 can be cut into any number.
        sharding = sharding_from_description(self._description, (0,) * rank)
        if not isinstance(sharding, kind):
            raise InvalidInput(
                f"the devices of {self} are not those of this program ({jax.devices()}); give a sharding "
                "over devices that are"
            )
        return sharding


class NamedShardingMetadata(ShardingMetadata):
    """A `jax.sharding.NamedSharding` as it was saved."""

    @property
    def shape(self) -> Any:
        """The sizes of the mesh's axes, as a NumPy array."""
        return np.array([size for _, size in self._description["mesh"]["axes"]])

    @property
    def axis_names(self) -> list[str]:
        """The names of the mesh's axes."""
        return [name for name, _ in self._description["mesh"]["axes"]]

    @property
    def axis_types(self) -> tuple[Any, ...]:
        """The types of the mesh's axes (`jax.sharding.AxisType`)."""
        kinds = self._description["mesh"]["axis_types"]
        return tuple(getattr(jax.sharding.AxisType, kind.capitalize()) for kind in kinds)

    @property
    def partition_spec(self) -> tuple[Any, ...]:
        """For each axis of the array None, the name of an axis of the mesh, or a list of such names."""
        return tuple(self._description["spec"])

    @property
    def device_mesh(self) -> DeviceMetadataMesh:
        """The devices of the mesh, by their numbers."""
        numbers = self._description["mesh"]["devices"]
        devices = np.empty(len(numbers), object)
        devices[:] = [DeviceMetadata(number) for number in numbers]
        return DeviceMetadataMesh(devices.reshape(self.shape).tolist())

    def to_jax_sharding(self) -> NamedSharding:
        """The sharding.

        Raises:
            InvalidInput: This program does not have its devices.
        """
        sharding: NamedSharding = self._rebuilt(NamedSharding)
        return sharding

    def __repr__(self) -> str:
        return (
            f"NamedShardingMetadata(shape={self.shape}, axis_names={self.axis_names}, "
            f"axis_types={self.axis_types}, partition_spec={self.partition_spec}) "
            f"device_mesh={self.device_mesh}"
        )


class SingleDeviceShardingMetadata(ShardingMetadata):
    """A `jax.sharding.SingleDeviceSharding` as it was saved."""

    @property
    def device_str(self) -> str:
        """The device, as JAX writes it."""
        sharding = sharding_from_description(self._description, ())
        if sharding is not None:
            return str(next(iter(sharding.device_set)))
        platform = self._description["platform"]
        return f"{'cuda' if platform == 'gpu' else platform}:{self._description['device']}"

    def to_jax_sharding(self) -> SingleDeviceSharding:
        """The sharding.

        Raises:
            InvalidInput: This program does not have its device.
        """
        sharding: SingleDeviceSharding = self._rebuilt(SingleDeviceSharding)
        return sharding

    def __repr__(self) -> str:
        return f"SingleDeviceShardingMetadata(device_str={self.device_str})"


def sharding_metadata(description: dict[str, Any] | None, shape: tuple[int, ...]) -> ShardingMetadata | None:
    """What metadata show of the description of a sharding; None if it does not describe one in full.

    Raises:
        Corrupt: No sharding could have been described like this.
    """
    if description is None:
        return None
    sharding_from_description(description, shape)  # checks it
    kinds = {"named": NamedShardingMetadata, "single": SingleDeviceShardingMetadata}
    kind = kinds.get(description["kind"])
    return None if kind is None else kind(description)
