"""DTensors: what this process holds of them as blocks to be saved, and their making from filled buffers.

Nothing here communicates, except that a mesh that only a checkpoint knows has to be made. Invariants: which
process holds what follows from mesh, placements and shape alone; the local tensor is checked against it, so
that a DTensor whose parts do not fit together is refused and never saved as something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from waystation._errors import InvalidInput, UnsupportedLeaf
from waystation.frameworks import dtypes, torch_memory, torch_meshes, torch_shardings
from waystation.frameworks.base import ArraySource, Block, StoredArray
from waystation.frameworks.torch_meshes import KnownMesh, device_of
from waystation.frameworks.torch_shards import LocalShard, Split, local_shard, spread_of
from waystation.grid import Box, Shape, Spread, slices_of_box

# More forms than this belong to a program whose shapes never come again.
_MOST_FORMS = 4096


@dataclass(slots=True, eq=False)
class Form:
    """What DTensors of one mesh, placements and shape have in common.

    Attributes:
        known: The mesh, or one that equals it.
        placements: One for each axis of the mesh.
        splits: The same as arithmetic.
        shape: Of the whole tensor.
        shard: What this process holds; None if it is no part of the mesh.
        sharding: The description.
    """

    known: KnownMesh
    placements: tuple[Any, ...]
    splits: tuple[Split | None, ...]
    shape: Shape
    shard: LocalShard | None
    sharding: dict[str, Any]
    _spread: Spread | None = None
    _spec: Any = None  # torch's own description, as the last DTensor made of this form has it

    @property
    def spread(self) -> Spread:
        """Which processes hold what; only saves need it."""
        if self._spread is None:
            self._spread = spread_of(self.shape, self.known.copies, (None, *self.splits))
        return self._spread

    @property
    def boxes(self) -> list[Box]:
        """What this process needs of the tensor."""
        return [] if self.shard is None else list(self.shard.boxes)

    def spec(self, mesh: DeviceMesh, dtype: torch.dtype) -> Any:
        """How torch describes DTensors of this form on a mesh, which equals that of the form."""
        spec = self._spec
        if spec is None or spec.mesh is not mesh or spec.tensor_meta.dtype is not dtype:
            spec = _without_data(mesh, self.placements, self.shard, self.shape, dtype)._spec
            self._spec = spec
        return spec


def form_of(leaf: DTensor) -> Form:
    """The form of a DTensor, concrete or abstract.

    Raises:
        UnsupportedLeaf: Its placements have no elements of their own, or an order that torch keeps to itself.
    """
    spec = leaf._spec
    order = getattr(spec, "shard_order", None)  # since torch 2.10
    if order and any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise UnsupportedLeaf(
            f"this DTensor divides an axis in the order {order} of the mesh's axes, which only torch itself "
            "can make; save leaf.redistribute(placements=...) with the placements that it should have"
        )
    return _form(torch_meshes.known_mesh(spec.mesh), spec.placements, tuple(leaf.shape))


def rebuilt_form(description: dict[str, Any], shape: Shape) -> Form | None:
    """The form that a stored array had; None if the present program cannot have its mesh.

    All processes have to call this: a mesh may have to be made.
    """
    described, splits = torch_shardings.parse(description, shape)
    if not torch_meshes.fits(described):
        return None
    known = torch_meshes.known_mesh(torch_meshes.rebuilt(described))
    return _form(known, _placements(splits), shape)


def _form(known: KnownMesh, placements: tuple[Any, ...], shape: Shape) -> Form:
    found: Form | None = known.forms.get((placements, shape))
    if found is not None:
        return found
    if len(known.forms) >= _MOST_FORMS:
        known.forms.clear()
    splits = tuple([_split(placement, len(shape)) for placement in placements])
    # One description for all shapes: later layers tell equal ones by identity.
    sharding = known.shardings.get(splits)
    if sharding is None:
        sharding = known.shardings[splits] = torch_shardings.describe(known.description, splits)
    at = known.coordinates
    shard = None if at is None else local_shard(shape, known.copies.shape[1:], splits, at)
    found = known.forms[placements, shape] = Form(known, placements, splits, shape, shard, sharding)
    return found


def _split(placement: Any, rank: int) -> Split | None:
    # In torch before 2.9 strided shards are shards too.
    if isinstance(placement, _StridedShard):
        split = Split(placement.dim, int(placement.split_factor))
    elif isinstance(placement, Shard):
        split = Split(placement.dim)
    elif isinstance(placement, Replicate):
        return None
    elif placement.is_partial():
        raise UnsupportedLeaf(
            f"a DTensor with {placement} holds parts of sums, not values; save leaf.redistribute(placements="
            "...) with Replicate() or Shard(...) in its place"
        )
    else:
        raise UnsupportedLeaf(
            f"DTensors with {placement} cannot be saved or loaded; redistribute them to Shard and Replicate"
        )
    axis = split.axis + rank if split.axis < 0 else split.axis
    if not 0 <= axis < rank:
        raise InvalidInput(f"a DTensor of {rank} axes cannot have {placement}")
    return Split(axis, split.pieces)


def _placements(splits: Sequence[Split | None]) -> tuple[Any, ...]:
    return tuple([_placement(split) for split in splits])


def _placement(split: Split | None) -> Any:
    if split is None:
        return Replicate()
    return Shard(split.axis) if split.pieces == 1 else _StridedShard(split.axis, split_factor=split.pieces)


# ---- saving ------------------------------------------------------------------------------------


def source(leaf: DTensor) -> ArraySource:
    """Describes a DTensor: what this process holds of it, and who holds the rest."""
    logical = torch_memory.logical_of(leaf)
    form = form_of(leaf)
    blocks: list[Block] = []
    mutable = False
    if form.shard is not None:
        local = _local(leaf, form.shard)
        whole = len(form.shard.boxes) == 1
        for (offset, extents), place in zip(form.shard.boxes, form.shard.places, strict=True):
            part = local if whole else local[slices_of_box((place, extents))]
            block, shared = torch_memory.block_of(part, logical, offset)
            blocks.append(block)
            mutable = mutable or shared
    return ArraySource(
        form.shape,
        logical.name,
        "torch",
        logical.storage,
        logical.storage_shape(form.shape),
        form.sharding,
        {"requires_grad": True} if leaf.requires_grad and leaf.is_leaf else {},
        storage_item_bytes=logical.storage_item_bytes,
        blocks=blocks,
        spread=form.spread,
        mutable=mutable,
    )


def _local(leaf: DTensor, shard: LocalShard) -> torch.Tensor:
    local = leaf._local_tensor.detach()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    torch_memory.check_readable(local)
    if tuple(local.shape) != shard.shape:
        raise InvalidInput(
            f"process {distributed.get_rank()} holds {tuple(local.shape)} of a DTensor of "
            f"{tuple(leaf.shape)} with {leaf.placements} on {leaf.device_mesh}, where torch places "
            f"{shard.shape}; give DTensor.from_local the shape and stride of the whole, or make it by "
            "distribute_tensor"
        )
    return local


# ---- loading -----------------------------------------------------------------------------------


def asked_mesh(abstract: DTensor, form: Form) -> DeviceMesh:
    """The mesh of what an abstract DTensor asks for: its own, if that can carry more than a description."""
    mesh = abstract.device_mesh
    return form.known.mesh if torch_meshes.is_template(mesh) else mesh


def present_device(abstract: DTensor, mesh: DeviceMesh) -> torch.device:
    """Where an abstract DTensor wants its local tensor: of one without memory, where its mesh is."""
    device = abstract.device
    return device_of(mesh) if device.type == "meta" else device


def local_tensor(form: Form, buffers: Sequence[np.ndarray[Any, Any]], dtype: str) -> torch.Tensor:
    """The local tensor in host memory: the buffer itself where there is one, else put together."""
    shard = form.shard
    if shard is not None and len(shard.boxes) == 1:
        return torch_memory.over(buffers[0], dtype)
    whole: np.ndarray[Any, Any] = np.empty((0,) if shard is None else shard.shape, dtypes.numpy_dtype(dtype))
    if shard is not None:
        for buffer, (_, extents), place in zip(buffers, shard.boxes, shard.places, strict=True):
            whole[slices_of_box((place, extents))] = buffer
    return torch_memory.over(whole, dtype)


def distributed_tensor(form: Form, mesh: DeviceMesh, local: torch.Tensor) -> torch.Tensor:
    """The DTensor of the local tensors of all processes."""
    # from_local would take ten times as long, and bring what a module keeps in host memory to the mesh.
    made: torch.Tensor = DTensor(local, form.spec(mesh, local.dtype), requires_grad=False)
    return made


def abstract(stored: StoredArray) -> DTensor | None:
    """The abstract DTensor of a stored one; None if the present program cannot have its mesh."""
    assert stored.sharding is not None
    described, splits = torch_shardings.parse(stored.sharding, stored.shape)
    if not torch_meshes.fits(described):
        return None
    mesh = torch_meshes.template(described)
    at = mesh.get_coordinate()
    shard = None if at is None else local_shard(stored.shape, described.shape, splits, at)
    dtype = torch_memory.torch_dtype(stored.dtype)
    return _without_data(mesh, _placements(splits), shard, stored.shape, dtype)


def _without_data(
    mesh: DeviceMesh,
    placements: tuple[Any, ...],
    shard: LocalShard | None,
    shape: Shape,
    dtype: torch.dtype,
) -> DTensor:
    """A DTensor on the meta device."""
    # Of what a process outside of the mesh gives, torch takes no more than the shape of a scalar.
    local_shape = shard.shape if shard is not None else (0,) if shape else ()
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    with torch.no_grad():
        return DTensor.from_local(
            torch_memory.without_data(local_shape, dtype),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(reversed(strides)),
        )
