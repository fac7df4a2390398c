"""torch leaves: tensors of any strides on any device, and DTensors, to blocks and back.

Invariants: CPU and CUDA memory is never copied here, only named, and counts as mutable; loaded CPU tensors
share memory with the buffers that the loader filled. In a program of several processes a plain tensor is
taken to be the same in all of them, which then share the writing of it; a DTensor is what it says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from waystation import _native
from waystation._errors import InvalidInput, WaystationError
from waystation.frameworks import casts, dtypes, torch_devices, torch_in_place, torch_memory
from waystation.frameworks.base import (
    ArraySource,
    Broadcaster,
    Broadcasting,
    Codec,
    Contiguous,
    InPlace,
    OnDevices,
    OverMemory,
    Replicas,
    StoredArray,
    Target,
)
from waystation.frameworks.kinds import targets_by_kind
from waystation.frameworks.storage import Storage
from waystation.grid import Shape, Spread, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from waystation.frameworks.torch_distributed import Form


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor that is to be loaded goes.

    Attributes:
        device: Of the tensor, or of the local tensor of a DTensor.
        requires_grad: Whether it requires a gradient.
        form: Of a DTensor; None for a plain tensor.
        mesh: Of a DTensor.
    """

    device: torch.device
    requires_grad: bool
    form: Form | None = None
    mesh: DeviceMesh | None = None

    def finished(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was asked for, made of what this process holds of it."""
        if self.form is not None:
            tensor = _distributed().distributed_tensor(self.form, self.mesh, tensor)
        return tensor.requires_grad_() if self.requires_grad else tensor


# Where most tensors go, without and with a gradient.
_ON_CPU = Placement(torch.device("cpu"), False), Placement(torch.device("cpu"), True)


class _OverMemory:
    """Plain tensors on the CPU over memory that is still written to."""

    def is_made_over_memory(self, target: Target) -> bool:
        """Whether `arrays_over` makes the tensor."""
        return target.placement is _ON_CPU[False] and torch_memory.is_made_over_memory(target.dtype)

    def arrays_over(
        self, targets: Sequence[Target], slabs: Sequence[_native.Slab | None], offsets: Sequence[int]
    ) -> list[torch.Tensor]:
        """Tensors over parts of slabs, which may still be written; they keep the memory."""
        shapes = [target.shape for target in targets]
        return torch_memory.tensors_over(slabs, offsets, shapes, [target.dtype for target in targets])


class _Broadcasting:
    """What several processes need of tensors."""

    def replicas(
        self, targets: Sequence[Target], axis: str | int | None, first: int
    ) -> list[Replicas | None]:
        """What several processes need of each tensor: all of plain ones, and what DTensors replicate over
        any axis of their meshes; `axis` and `first` are of those of JAX."""
        if _process_count() == 1:
            return [None] * len(targets)
        found: dict[Any, Replicas | None] = {}
        spreads = _Replicated()
        for target in targets:
            form = target.placement.form
            key = target.shape if form is None else id(form)
            if key not in found:
                found[key] = Replicas.of(spreads.spread(target.shape) if form is None else form.spread)
        return [
            found[target.shape if target.placement.form is None else id(target.placement.form)]
            for target in targets
        ]

    def broadcaster(self, targets: Sequence[Target]) -> Broadcaster:
        """What carries that from one process to the others: the process groups of the program and of the
        meshes of these tensors, and others where there are none for the same processes."""
        from waystation.frameworks import torch_groups

        return torch_groups.TorchBroadcaster([target.placement.mesh for target in targets])


class TorchCodec(Codec):
    """`torch.Tensor` in all its forms to blocks and back."""

    name = "torch"
    in_place: InPlace | None = torch_in_place
    devices: OnDevices | None = torch_devices
    over_memory: OverMemory | None = _OverMemory()
    broadcasting: Broadcasting | None = _Broadcasting()

    def is_leaf(self, value: Any) -> bool:
        """Whether `value` is a tensor; those on the meta device and fake ones are abstract."""
        return isinstance(value, torch.Tensor)

    def contiguous(self, leaves: Sequence[Any]) -> Contiguous:
        """Describes plain tensors on the CPU that are contiguous."""
        kinds: list[ArraySource | None] = []
        which, addresses, owners = [-1] * len(leaves), [0] * len(leaves), [None] * len(leaves)
        known: dict[Any, int] = {}
        spreads = _Replicated() if _process_count() > 1 else None
        for index, leaf in enumerate(leaves):
            if not torch_memory.is_contiguous(leaf):
                continue
            key = leaf.dtype, leaf.shape, leaf.requires_grad and leaf.is_leaf
            kind = known.get(key)
            if kind is None:
                kind = _add_kind(kinds, leaf, spreads)
                known[key] = kind
            which[index], addresses[index], owners[index] = kind, leaf.data_ptr(), leaf.detach()
        return Contiguous(kinds, np.array(which, np.int64), np.array(addresses, np.int64), owners)

    def sources(self, leaves: Sequence[Any]) -> list[ArraySource]:
        """Describes tensors, without copying; kernels that still write to them are awaited."""
        found = []
        spreads = _Replicated() if _process_count() > 1 else None
        for index, leaf in enumerate(leaves):
            try:
                found.append(_source(leaf, spreads))
            except WaystationError as error:
                raise error.where(index=index)
        for ordinal in {block.device for source in found for block in source.blocks} - {-1}:
            torch.cuda.synchronize(ordinal)
        return found

    def targets(self, abstracts: Sequence[Any], stored: Sequence[StoredArray]) -> list[Target]:
        """Of DTensors what this process holds, other tensors whole; on the device of the abstract one."""
        found = []
        known: dict[Any, Target] = {}  # of plain tensors that differ in nothing that counts
        for index, (abstract, array) in enumerate(zip(abstracts, stored, strict=True)):
            is_plain = type(abstract) in (torch.Tensor, torch.nn.Parameter)
            kind = (id(array), *_kind_of(abstract)) if is_plain else None
            target = known.get(kind)
            if target is None:
                try:
                    dtype = torch_memory.logical_of(abstract).name
                    casts.check_request(abstract.shape, dtype, array, index)
                    target = _target(array, dtype, _asked(abstract))
                except WaystationError as error:
                    raise error.where(index=index)
                if is_plain:
                    known[kind] = target
            found.append(target)
        return found

    def default_targets(self, stored: Sequence[StoredArray]) -> list[Target]:
        """DTensors as they were saved, if this program can have their mesh; other tensors whole, on the
        device that they were saved from, or the CPU if that is not here."""
        found = []
        forms: dict[tuple[int, Shape], Form | None] = {}
        for index, array in enumerate(stored):
            try:
                found.append(_target(array, array.dtype, _saved(array, forms)))
            except WaystationError as error:
                raise error.where(index=index)
        return found

    def place_of(self, place: Any) -> Placement:
        """A device; None for the CPU."""
        try:
            device = torch.device("cpu" if place is None else place)
        except (RuntimeError, TypeError) as error:
            raise InvalidInput(f"{place!r:.200} is no torch device: {error}") from error
        if device.type == "meta":
            raise InvalidInput("tensors on the meta device have no data; give a device that has memory")
        device = _present(device)
        return _ON_CPU[False] if device.type == "cpu" else Placement(device, requires_grad=False)

    def placed(
        self, stored: Sequence[StoredArray], dtypes: Sequence[str], places: Sequence[Any]
    ) -> list[Target]:
        """Each tensor whole, on a given device; targets of one description and place are one object."""
        return targets_by_kind(_placed, stored, dtypes, places)

    def assemble(self, targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
        """Tensors over the buffers, or copies of them on other devices."""
        made = []
        copied = []  # the copies to devices read them until those are done
        devices = set()
        on_cpu, over = _ON_CPU[False], torch_memory.over
        for target, own in zip(targets, boxes, strict=True):
            place = target.placement
            if place is on_cpu:
                made.append(over(own[0], target.dtype))
                continue
            devices.add(place.device)
            tensor = torch_memory.over(own[0], target.dtype) if place.form is None else _local(target, own)
            if place.device.type != "cpu":
                copied.append(tensor)
                tensor = tensor.to(place.device, non_blocking=True)
            made.append(place.finished(tensor))
        for device in (device for device in devices if device.type == "cuda"):
            torch.cuda.synchronize(device)
        return made

    def stays_on_host(self, target: Target) -> bool:
        """Whether the tensor shares memory with the buffers that it is made of."""
        return torch_devices.stays_on_host(target)

    def open_in_pieces(self, target: Target) -> torch_devices.PieceWriter | None:
        """What puts the tensor together on its device; None where it is made of whole boxes only."""
        return torch_devices.PieceWriter(target) if torch_devices.goes_in_pieces(target) else None

    def shown(self, stored: StoredArray, storage: Storage) -> Any:
        """The abstract tensor, with how it is stored in an attribute."""
        abstract = self.abstract(stored)
        abstract.storage_metadata = storage()
        return abstract

    def abstract(self, stored: StoredArray) -> Any:
        """A tensor without data, on the meta device; of a DTensor another, if this program can have its
        mesh. That one only shows its mesh: the load that it is given to makes it, where it has to."""
        dtypes.of_stored(stored)
        tensor = None
        if stored.sharding is not None and _shardings().is_dtensor(stored.sharding) and _is_initialized():
            tensor = _distributed().abstract(stored)
        if tensor is None:
            tensor = torch_memory.without_data(stored.shape, torch_memory.torch_dtype(stored.dtype))
        return tensor.requires_grad_(stored.extra.get("requires_grad") is True)


# ---- saving ------------------------------------------------------------------------------------


class _Replicated:
    """The spreads of tensors that all processes hold; equal ones are one object."""

    def __init__(self) -> None:
        self._ranks = tuple(range(_process_count()))
        self._known: dict[Shape, Spread] = {}

    def spread(self, shape: Shape) -> Spread:
        found = self._known.get(shape)
        if found is None:
            from waystation.frameworks.torch_shards import replicated

            found = self._known[shape] = replicated(shape, self._ranks)
        return found


def _source(leaf: torch.Tensor, spreads: _Replicated | None) -> ArraySource:
    if _is_distributed(type(leaf)):
        described: ArraySource = _distributed().source(leaf)
        return described
    torch_memory.check_readable(leaf)
    logical = torch_memory.logical_of(leaf)
    shape = tuple(leaf.shape)
    block, shared = torch_memory.block_of(leaf.detach(), logical, (0,) * len(shape))
    return ArraySource(
        shape,
        logical.name,
        "torch",
        logical.storage,
        block.shape,
        torch_memory.describe_device(leaf.device),
        {"requires_grad": True} if leaf.requires_grad and leaf.is_leaf else {},
        storage_item_bytes=logical.storage_item_bytes,
        blocks=[block],
        spread=None if spreads is None else spreads.spread(shape),
        mutable=shared,
    )


def _add_kind(kinds: list[ArraySource | None], leaf: torch.Tensor, spreads: _Replicated | None) -> int:
    """The number of another kind of tensors, that of a leaf; -1 if that is refused."""
    try:
        kinds.append(replace(_source(leaf, spreads), blocks=[]))
    except WaystationError:
        return -1
    return len(kinds) - 1


# ---- loading -----------------------------------------------------------------------------------


def _target(stored: StoredArray, dtype: str, place: Placement) -> Target:
    dtypes.of_stored(stored)
    torch_memory.check_gradient(dtype, place.requires_grad)
    shape = stored.shape
    return Target(shape, dtype, [whole(shape)] if place.form is None else place.form.boxes, place)


def _placed(stored: StoredArray, dtype: str, place: Placement, index: int) -> Target:
    if dtype != stored.dtype:
        casts.check_request(stored.shape, dtype, stored, index)
    return _target(stored, dtype, place)


def _kind_of(abstract: torch.Tensor) -> tuple[Any, ...]:
    return abstract.dtype, abstract.shape, abstract.device, abstract.requires_grad


def _asked(abstract: torch.Tensor) -> Placement:
    requires_grad = bool(abstract.requires_grad)
    if not _is_distributed(type(abstract)):
        device = _present(abstract.device)
        return _ON_CPU[requires_grad] if device.type == "cpu" else Placement(device, requires_grad)
    form = _distributed().form_of(abstract)
    mesh = _distributed().asked_mesh(abstract, form)
    return Placement(_present(_distributed().present_device(abstract, mesh)), requires_grad, form, mesh)


def _saved(stored: StoredArray, forms: dict[tuple[int, Shape], Form | None]) -> Placement:
    requires_grad = stored.extra.get("requires_grad") is True
    if stored.sharding is None:
        return _ON_CPU[requires_grad]
    if not _shardings().is_dtensor(stored.sharding):
        return Placement(_saved_device(stored), requires_grad)
    key = id(stored.sharding), stored.shape  # the descriptions outlive the batch
    if key not in forms:
        forms[key] = _saved_form(stored)
    form = forms[key]
    if form is None:
        return Placement(torch.device("cpu"), requires_grad)
    mesh = form.known.mesh
    return Placement(_distributed().device_of(mesh), requires_grad, form, mesh)


def _saved_form(stored: StoredArray) -> Form | None:
    """The form at save; None for a tensor that one process held, which any program can have whole."""
    assert stored.sharding is not None
    described, _ = _shardings().parse(stored.sharding, stored.shape)
    form = _distributed().rebuilt_form(stored.sharding, stored.shape) if _is_initialized() else None
    if form is None and len(described.ranks) > 1:
        here = f"{_process_count()} processes" if _is_initialized() else "no torch.distributed"
        raise InvalidInput(
            f"the tensor was saved as a DTensor on {described}, this program has {here}; load with an "
            "abstract state: for whole tensors torch.empty(shape, dtype=..., device='meta'), for DTensors "
            "distribute_tensor of that on a mesh of this program, or a module whose parameters are such; or "
            "load(path, framework='numpy') for NumPy arrays (the option array.loading.restore_on_host)"
        )
    return form


def _present(device: torch.device) -> torch.device:
    """Where a tensor goes that an abstract one on `device` asks for."""
    if device.type == "meta":
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"a tensor is wanted on {device}, this process has {torch.cuda.device_count()} CUDA devices; "
            "give a device that is here, such as 'cpu'"
        )
    if device.type not in ("cpu", "cuda"):
        _check_present(device)
    return device


@lru_cache(maxsize=16)
def _check_present(device: torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"a tensor is wanted on {device}, which is not here: {reason}") from error


def _saved_device(stored: StoredArray) -> torch.device:
    text = stored.sharding.get("device") if stored.sharding else None
    if not isinstance(text, str):
        return torch.device("cpu")
    kind, _, number = text.partition(":")
    ordinal = int(number) if number.isascii() and number.isdigit() else 0
    if kind == "cuda" and ordinal < torch.cuda.device_count():
        return torch.device(kind, ordinal)
    return torch.device("cpu")


def _local(target: Target, buffers: list[Any]) -> torch.Tensor:
    local: torch.Tensor = _distributed().local_tensor(target.placement.form, buffers, target.dtype)
    return local


# ---- several processes -------------------------------------------------------------------------


def _is_initialized() -> bool:
    # Builds of torch without the distributed part have little more than the first of these.
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _process_count() -> int:
    return torch.distributed.get_world_size() if _is_initialized() else 1


def _is_distributed(cls: type) -> bool:
    """Whether a type of tensor is DTensor or derived from it; imports nothing."""
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(cls, module.DTensor)


def _distributed() -> Any:
    """What knows DTensors; imported only where there is one."""
    from waystation.frameworks import torch_distributed

    return torch_distributed


CODEC = TorchCodec()


def _shardings() -> Any:
    """What reads how tensors were sharded; imported only where one was."""
    from waystation.frameworks import torch_shardings

    return torch_shardings
