"""Device meshes of this program: what is known of each, and the meshes that a checkpoint describes.

To make a mesh is collective: all processes of the program have to, in the same order. So one is made only
for a load without an abstract state, which all processes take part in, at most once for each description,
and not at all where a save or a load has met an equal one. Whoever only wants to show how an array was
sharded gets a *template*: a mesh without process groups, which nobody else need know of.

Invariants: everything here belongs to the present process group and is forgotten with it; meshes are never
looked for among the objects of the program, which may live for a different time in each process.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch.distributed import device_mesh as torch_device_mesh
from torch.distributed.device_mesh import DeviceMesh

from waystation import _forks
from waystation._distinct import distinct
from waystation._errors import InvalidInput, Unavailable
from waystation.frameworks.participation import require_all
from waystation.frameworks.torch_shardings import MeshDescription


@dataclass(slots=True, eq=False)
class KnownMesh:
    """What is known of a mesh.

    Attributes:
        mesh: The mesh.
        described: In plain values, with the meshes that were cut out of the same one beside it.
        description: The same in JSON values.
        copies: The processes, as an array of meshes.
        coordinates: Of this process, None if it is in none of them.
        shardings: The descriptions of shardings on this mesh, by how they divide arrays.
        forms: What is common to the arrays of one placement and shape on this mesh.
    """

    mesh: DeviceMesh
    described: MeshDescription
    description: dict[str, Any]
    copies: NDArray[np.int64]
    coordinates: tuple[int, ...] | None
    shardings: dict[Any, dict[str, Any]] = field(default_factory=dict)
    forms: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Meshes:
    """The meshes of one process group."""

    group: weakref.ref[Any]
    known: dict[DeviceMesh, KnownMesh] = field(default_factory=dict)
    by_description: dict[MeshDescription, DeviceMesh] = field(default_factory=dict)
    templates: dict[MeshDescription, DeviceMesh] = field(default_factory=dict)
    # Templates equal meshes with process groups, so they are told by identity.
    described_by_template: dict[int, MeshDescription] = field(default_factory=dict)


_known = _forks.WatchedLock()
_held: list[_Meshes] = []


def known_mesh(mesh: DeviceMesh) -> KnownMesh:
    """What is known of a mesh of this program; in place of a template, of the mesh that it stands for."""
    with _known.lock:
        meshes = _present()
        described = meshes.described_by_template.get(id(mesh))
        if described is not None:
            mesh = rebuilt(described)
        found = meshes.known.get(mesh)
        if found is None:
            found = meshes.known[mesh] = _look_at(mesh)
            meshes.by_description.setdefault(found.described, mesh)
        return found


def is_template(mesh: DeviceMesh) -> bool:
    """Whether a mesh only shows what was described."""
    return id(mesh) in _present().described_by_template


def fits(described: MeshDescription) -> bool:
    """Whether the present program can have a mesh that was described."""
    return (
        distributed.is_initialized()
        and distributed.get_world_size() == described.process_count
        and _is_available(described.device_type)
    )


def rebuilt(described: MeshDescription) -> DeviceMesh:
    """The mesh that was described and fits; all processes have to call this where one has to be made."""
    with _known.lock:
        meshes = _present()
        found = meshes.by_description.get(described)
        if found is None:
            found = meshes.by_description[described] = _make(described)
        return found


def template(described: MeshDescription) -> DeviceMesh:
    """A mesh that shows what was described and fits; made without the other processes."""
    with _known.lock:
        meshes = _present()
        found = meshes.by_description.get(described) or meshes.templates.get(described)
        if found is None:
            copies = described.copies()
            here = np.flatnonzero((copies == distributed.get_rank()).reshape(len(copies), -1).any(axis=1))
            found = DeviceMesh(
                described.device_type,
                torch.from_numpy(copies[here[0] if here.size else 0]),
                mesh_dim_names=described.axis_names,
                _init_backend=False,
            )
            meshes.templates[described] = found
            meshes.described_by_template[id(found)] = described
        return found


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this process in a mesh."""
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())


# ---- looking and making ------------------------------------------------------------------------


def _present() -> _Meshes:
    group = distributed.group.WORLD
    if group is None:
        raise InvalidInput(
            "a DTensor is of no use without torch.distributed; save and load before "
            "destroy_process_group, or save leaf.full_tensor()"
        )
    if not _held or _held[0].group() is not group:
        _held[:] = [_Meshes(weakref.ref(group))]
    return _held[0]


def _look_at(mesh: DeviceMesh) -> KnownMesh:
    copies = _with_copies(mesh)
    described = MeshDescription(
        mesh.device_type,
        copies.shape[1:],
        None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names),
        tuple(copies.ravel().tolist()),
        distributed.get_world_size(),
    )
    coordinates = mesh.get_coordinate()
    return KnownMesh(
        mesh,
        described,
        described.to_json(),
        copies,
        None if coordinates is None else tuple(coordinates),
    )


def _with_copies(mesh: DeviceMesh) -> NDArray[np.int64]:
    """The mesh and all others that the same cut makes of the mesh that it was cut out of.

    A cut keeps some axes of the larger mesh, or joins several, and leaves this process's place on the
    rest; every other place on those is a mesh of the same shape.
    """
    own = mesh.mesh.numpy().astype(np.int64)
    root = _root(mesh)
    larger = own if root is mesh else root.mesh.numpy().astype(np.int64)
    place = {rank: at for at, rank in enumerate(larger.ravel().tolist())}
    if not all(rank in place for rank in own.ravel().tolist()):
        return own[None]
    at = np.unravel_index([place[rank] for rank in own.ravel().tolist()], larger.shape)
    extents = [len(distinct(along)) for along in at]
    if any(extent not in (1, size) for extent, size in zip(extents, larger.shape, strict=True)):
        return own[None]
    others = [[0] if extent > 1 else range(size) for extent, size in zip(extents, larger.shape, strict=True)]
    meshes = [
        larger[tuple(along if extent > 1 else np.full_like(along, fixed) for along, extent, fixed in cut)]
        for cut in (zip(at, extents, place, strict=True) for place in product(*others))
    ]
    return np.stack(meshes).reshape(-1, *own.shape)


def _root(mesh: DeviceMesh) -> DeviceMesh:
    own = getattr(mesh, "_get_root_mesh", None)
    root: DeviceMesh = own() if own is not None else torch_device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def _make(described: MeshDescription) -> DeviceMesh:
    require_all(str(described))
    copies = torch.from_numpy(described.copies())
    names = described.axis_names
    try:
        if len(copies) == 1:
            return DeviceMesh(described.device_type, copies[0], mesh_dim_names=names)
        assert names is not None, "copies without names are refused with the description"
        larger = DeviceMesh(
            described.device_type, copies, mesh_dim_names=("copies of " + ", ".join(names), *names)
        )
        if not (copies == distributed.get_rank()).any():
            raise InvalidInput(f"{described} has no part of this process; give an abstract state")
        return larger[names]
    except RuntimeError as error:
        raise Unavailable(f"torch could not make {described}: {error}") from error


def _is_available(device_type: str) -> bool:
    module = getattr(torch, device_type, None)
    return device_type == "cpu" or bool(module and hasattr(module, "is_available") and module.is_available())
