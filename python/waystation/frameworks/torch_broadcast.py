"""The collectives that carry bytes between torch processes: those of the program's own process groups.

A group that exactly the right processes form is taken where there is one: that of the program, or that of an
axis of a mesh that the loaded tensors are on. Otherwise one is made, by its members alone, and kept for as
long as torch knows it. Invariants: all members of a group come to the same choice, since they look at the
same meshes in the same order; bytes go from and to host memory, through the device that the group works with
if that is another.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from waystation._errors import Unavailable
from waystation.frameworks.base import Group

# torch itself keeps them, until the program ends its process group.
_made: weakref.WeakValueDictionary[Group, Any] = weakref.WeakValueDictionary()


class TorchBroadcaster:
    """Carries bytes within process groups. See `base.Broadcaster`.

    Args:
        meshes: Of the tensors that are loaded; None for plain ones.
    """

    def __init__(self, meshes: Iterable[DeviceMesh | None]) -> None:
        self.process_index = distributed.get_rank()
        self._meshes = list({id(mesh): mesh for mesh in meshes if mesh is not None}.values())
        self._groups: dict[Group, Any] = {}

    def broadcast(self, layer: Sequence[Group], nbytes: int, piece: NDArray[np.uint8]) -> None:
        """Carries one piece in each group of a layer; each on its own, so that empty ones do nothing."""
        if not piece.size:
            return
        own = next(group for group in layer if self.process_index in group)
        host = torch.from_numpy(piece)
        try:
            group = self._group(tuple(sorted(own)))
            carried = host.to(_device_of(group))
            distributed.broadcast(carried, src=own[0], group=group)
            if carried is not host and own[0] != self.process_index:
                host.copy_(carried)
        except RuntimeError as error:
            raise Unavailable(
                f"torch could not send what process {own[0]} has read to the processes that need it as well "
                f"({', '.join(map(str, own[1:]))}): {str(error).partition(chr(10))[0]}. See whether one of "
                "them has died; set array.loading.load_and_broadcast = False to have every process read for "
                "itself"
            ) from error

    def _group(self, ranks: Group) -> Any:
        """The process group of the given processes."""
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = self._present(ranks) or _make(ranks)
        return group

    def _present(self, ranks: Group) -> Any:
        if len(ranks) == distributed.get_world_size():
            return distributed.group.WORLD
        for mesh in self._meshes:
            if mesh.get_coordinate() is None:
                continue
            for axis in range(mesh.ndim):
                group = mesh.get_group(axis)
                if tuple(sorted(distributed.get_process_group_ranks(group))) == ranks:
                    return group
        return None


def _make(ranks: Group) -> Any:
    """Makes a group; all of its members do, in the same order as any others that they have in common."""
    group = _made.get(ranks)
    if group is None:
        group = distributed.new_group(list(ranks), use_local_synchronization=True)
        _made[ranks] = group
    return group


def _device_of(group: Any) -> torch.device:
    """What the tensors of a group are on: the CPU if it can."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = sorted(kinds)[0]
    return torch.device(kind, getattr(torch, kind).current_device())
