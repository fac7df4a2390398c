"""What several processes need of JAX arrays, and the collective that carries it from one of them to the rest.

Bytes travel as unsigned integers, never as the numbers that they stand for: the sender's devices have the
words, those of the receivers zeros, and the sum over the processes is what was sent, bit by bit. All groups
of a layer go in one program over a mesh of *replicas, groups, devices*, each process with equally many
devices, which carry equal shares. Invariants: nothing here depends on the dtypes or shardings of arrays, so
that a program is compiled for each length of pieces, of which there are few; all processes of a layer run
the same program in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from waystation._errors import InvalidInput, Unavailable
from waystation.frameworks.base import Broadcaster, Group, Replicas, Target
from waystation.frameworks.jax_shardings import spread_of
from waystation.grid import Box, Shape, box_of_slices

_WORD_BYTES = 4

# ---- who needs the same ------------------------------------------------------------------------


def replicas(targets: Sequence[Target], axis: str | int | None, first: int) -> list[Replicas | None]:
    """What several processes need of each array.

    Args:
        targets: The arrays.
        axis: The mesh axis along which they share, by name or number; None for all axes.
        first: The place along that axis of the devices whose processes read.

    Raises:
        InvalidInput: There are arrays over several processes, but no mesh has such an axis, or one has fewer
            devices along it.
    """
    if axis is None and first:
        raise InvalidInput(
            f"the option primary_replica_id is {first}, which is a place along an axis; set the option "
            "replica_axis_index as well",
            option="array.loading.load_and_broadcast_options.primary_replica_id",
        )
    found: dict[int, Replicas | None] = {}
    shardings: list[Sharding] = []
    for target in targets:
        sharding = target.placement.sharding
        if id(target.placement) in found:  # it outlives the batch
            continue
        found[id(target.placement)] = None
        if not sharding.is_fully_addressable:
            shardings.append(sharding)
            found[id(target.placement)] = _replicas(sharding, target.shape, axis, first)
    if axis is not None and shardings and all(_position(sharding, axis) is None for sharding in shardings):
        meshes = {str(_axis_names(sharding)) for sharding in shardings} - {"()"}
        raise InvalidInput(
            f"no mesh of these arrays has the axis {axis!r} of the option array.loading.replica_axis; their "
            f"axes are {', '.join(sorted(meshes)) or 'without names'}",
            option="array.loading.replica_axis",
        )
    return [found[id(target.placement)] for target in targets]


def _replicas(sharding: Sharding, shape: Shape, axis: str | int | None, first: int) -> Replicas | None:
    if axis is None:
        return Replicas.of(spread_of(sharding, shape))
    position = _position(sharding, axis)
    if position is None:
        return None
    assert isinstance(sharding, NamedSharding)
    indices = sharding.devices_indices_map(shape)
    devices = np.moveaxis(sharding.mesh.devices, position, 0)
    if first >= len(devices):
        raise InvalidInput(
            f"the option primary_replica_id is {first}, but the axis {axis!r} has {len(devices)} devices",
            option="array.loading.load_and_broadcast_options.primary_replica_id",
        )
    devices = np.roll(devices, -first, axis=0)
    lines: dict[Box, list[list[int]]] = {}
    for line in devices.reshape(len(devices), -1).T:
        boxes = {box_of_slices(indices[device], shape) for device in line}
        if len(boxes) > 1:
            return None  # sharded along the axis
        lines.setdefault(boxes.pop(), []).append([device.process_index for device in line])
    return Replicas.made_of([(box, group) for box, own in lines.items() for group in _joined(own)])


def _position(sharding: Sharding, axis: str | int) -> int | None:
    """The place of an axis in the mesh of a sharding; None if it has none."""
    names = _axis_names(sharding)
    if isinstance(axis, str):
        return names.index(axis) if axis in names else None
    return axis % len(names) if -len(names) <= axis < len(names) else None


def _axis_names(sharding: Sharding) -> tuple[Any, ...]:
    return tuple(sharding.mesh.axis_names) if isinstance(sharding, NamedSharding) else ()


def _joined(lines: Iterable[Sequence[int]]) -> list[Group]:
    """Groups of the processes of some lines of devices, those joined that have processes in common. Each
    begins with a process that has the first device of a line."""
    joined: list[tuple[set[int], set[int]]] = []  # the first ones of their lines, and all
    for line in lines:
        first, members = {line[0]}, set(line)
        for other in [group for group in joined if not group[1].isdisjoint(members)]:
            joined.remove(other)
            first |= other[0]
            members |= other[1]
        joined.append((first, members))
    return [(min(first), *sorted(members - {min(first)})) for first, members in joined]


# ---- carrying ----------------------------------------------------------------------------------


def broadcaster(targets: Sequence[Target]) -> Broadcaster:
    """What carries that from one process to the others."""
    del targets
    return _JaxBroadcaster()


class _JaxBroadcaster:
    """Carries bytes by a program of all processes of a layer. See `base.Broadcaster`."""

    def __init__(self) -> None:
        self.process_index = jax.process_index()
        self._zeros: dict[tuple[Any, int], list[jax.Array]] = {}

    def broadcast(self, layer: Sequence[Group], nbytes: int, piece: NDArray[np.uint8]) -> None:
        """Carries one piece in each group of a layer."""
        mesh, devices = _mesh(tuple(layer))
        words = -(-nbytes // (_WORD_BYTES * len(devices)))
        sends = any(group[0] == self.process_index for group in layer)
        try:
            with in_scope(mesh):
                parts = _sent(piece, devices, words) if sends else self._nothing(devices, words)
                shape = (*mesh.devices.shape, words)
                sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
                received = _sum(mesh)(jax.make_array_from_single_device_arrays(shape, sharding, parts))
                received.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            raise Unavailable(
                f"JAX could not send what process {_own(layer, self.process_index)[0]} has read to the "
                f"processes that need it as well: {error}; set array.loading.load_and_broadcast = False to "
                "have every process read for itself"
            ) from error
        if not sends:
            _take(received, devices, piece)

    def _nothing(self, devices: Sequence[Any], words: int) -> list[jax.Array]:
        key = (tuple(devices), words)
        if key not in self._zeros:
            self._zeros = {key: _put([np.zeros(words, np.uint32)] * len(devices), devices)}
        return self._zeros[key]


def _own(layer: Sequence[Group], process_index: int) -> Group:
    return next(group for group in layer if process_index in group)


@lru_cache(maxsize=64)
def _mesh(layer: tuple[Group, ...]) -> tuple[Mesh, list[Any]]:
    """The mesh of a layer, and the devices of this process in it, in their order there."""
    by_process: dict[int, list[Any]] = {process: [] for group in layer for process in group}
    for device in jax.devices():
        if device.process_index in by_process:
            by_process[device.process_index].append(device)
    count = min(len(devices) for devices in by_process.values())
    shape = (len(layer[0]), len(layer), count)
    devices = np.empty(shape, object)
    for number, group in enumerate(layer):
        for replica, process in enumerate(group):
            devices[replica, number] = by_process[process][:count]
    return Mesh(devices, ("replica", "group", "device")), by_process[jax.process_index()][:count]


@lru_cache(maxsize=64)
def _sum(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """The program: the words of the process of each group that has some, in all of its processes."""
    sharding = NamedSharding(mesh, PartitionSpec("group", "device"))
    add = partial(jnp.sum, axis=0, dtype=jnp.uint32)
    program: Callable[[jax.Array], jax.Array] = jax.jit(add, out_shardings=sharding)
    return program


def in_scope(mesh: Mesh) -> AbstractContextManager[Any]:
    """Whatever mesh the program has set, this one counts here. JAX before 0.7 needs the mesh alone."""
    own: AbstractContextManager[Any] = jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else mesh
    return own


def _sent(piece: NDArray[np.uint8], devices: Sequence[Any], words: int) -> list[jax.Array]:
    """A piece, divided among devices."""
    padded = np.empty((len(devices), words), np.uint32)
    padded.reshape(-1).view(np.uint8)[: piece.size] = piece
    return _put(list(padded), devices)


def _put(shares: Sequence[NDArray[np.uint32]], devices: Sequence[Any]) -> list[jax.Array]:
    put: list[jax.Array] = jax.device_put([share[None, None, None] for share in shares], list(devices))
    return put


def _take(received: jax.Array, devices: Sequence[Any], piece: NDArray[np.uint8]) -> None:
    """Puts together what the devices have received."""
    by_device = {shard.device: shard.data for shard in received.addressable_shards}
    begin = 0
    for device in devices:
        share = np.asarray(jax.device_get(by_device[device])).reshape(-1).view(np.uint8)
        taken = share[: piece.size - begin]
        piece[begin : begin + taken.size] = taken
        begin += taken.size
