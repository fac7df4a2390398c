"""torch leaves: tensors of any strides on any device to blocks and back.

Invariants: CPU and CUDA memory is never copied here, only named, and counts as mutable; what torch does not
lay out by strides (sparse, nested, quantized, distributed, wrapped tensors) is refused, with what to save
instead; loaded CPU tensors share memory with the buffers that the loader filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from waystation._errors import InvalidInput, Unsupported, WaystationError
from waystation.frameworks import dtypes
from waystation.frameworks.base import ArraySource, Block, StoredArray, Target

# torch also names int2, uint4 and their like, but has no arithmetic or storage for them.
_SHELLS = frozenset({"int1", "int2", "int4", "uint1", "uint2", "uint4"})

_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in dtypes.TABLE
    if name not in _SHELLS and isinstance(getattr(torch, name, None), torch.dtype)
}
_LOGICAL: dict[torch.dtype, dtypes.LogicalDtype] = {
    dtype: dtypes.TABLE[name] for name, dtype in _BY_NAME.items()
}
_INTEGER_OF_SIZE: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_DIRECT = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of a tensor that is to be loaded, and whether it requires a gradient."""

    device: torch.device
    requires_grad: bool


class TorchCodec:
    """`torch.Tensor` in all its forms to blocks and back."""

    name = "torch"

    def is_leaf(self, value: Any) -> bool:
        """Whether `value` is a tensor; those on the meta device and fake ones are abstract."""
        return isinstance(value, torch.Tensor)

    def sources(self, leaves: Sequence[Any]) -> list[ArraySource]:
        """Describes tensors, without copying; kernels that still write to them are awaited."""
        found = []
        for index, leaf in enumerate(leaves):
            try:
                found.append(_source(leaf))
            except WaystationError as error:
                raise error.where(index=index)
        for ordinal in {block.device for source in found for block in source.blocks} - {-1}:
            torch.cuda.synchronize(ordinal)
        return found

    def targets(self, abstracts: Sequence[Any], stored: Sequence[StoredArray]) -> list[Target]:
        """Each tensor whole, on the device of the abstract tensor; on the CPU for the meta device."""
        found = []
        for index, (abstract, array) in enumerate(zip(abstracts, stored, strict=True)):
            try:
                dtype = _logical_of(abstract).name
                dtypes.check_request(abstract.shape, dtype, array, index)
                place = Placement(_present(abstract.device), bool(abstract.requires_grad))
                found.append(_whole(array, dtype, place))
            except WaystationError as error:
                raise error.where(index=index)
        return found

    def default_targets(self, stored: Sequence[StoredArray]) -> list[Target]:
        """Each tensor whole, on the device that it was saved from, or the CPU if that is not here."""
        found = []
        for index, array in enumerate(stored):
            try:
                place = Placement(_saved_device(array), array.extra.get("requires_grad") is True)
                found.append(_whole(array, array.dtype, place))
            except WaystationError as error:
                raise error.where(index=index)
        return found

    def assemble(self, targets: Sequence[Target], boxes: Sequence[list[Any]]) -> list[Any]:
        """Tensors over the buffers, or copies of them on other devices."""
        made = []
        for target, (buffer,) in zip(targets, boxes, strict=True):
            tensor = _over(buffer, target.dtype)
            place = target.placement
            if place.device.type != "cpu":
                tensor = tensor.to(place.device, non_blocking=True)
            made.append(tensor.requires_grad_() if place.requires_grad else tensor)
        devices = {target.placement.device for target in targets}
        for device in (device for device in devices if device.type == "cuda"):
            torch.cuda.synchronize(device)  # the copies read the buffers until then
        return made

    def abstract(self, stored: StoredArray) -> Any:
        """A tensor without data, on the meta device."""
        dtypes.of_stored(stored)
        dtype = _torch_dtype(stored.dtype)
        # Half-width complex dtypes warn wherever a tensor of them is made, though not where one is viewed.
        plain = torch.int32 if stored.dtype in ("complex32", "bcomplex32") else dtype
        tensor = torch.empty(stored.shape, dtype=plain, device="meta").view(dtype)
        return tensor.requires_grad_(stored.extra.get("requires_grad") is True)


# ---- saving ------------------------------------------------------------------------------------


def _source(leaf: torch.Tensor) -> ArraySource:
    _check_kind(leaf)
    logical = _logical_of(leaf)
    tensor = leaf.detach()
    resolved = tensor.resolve_conj().resolve_neg()
    if tensor.device.type == "cuda" and torch.version.hip is None:
        resolved = resolved.contiguous()
    elif tensor.device.type != "cpu":  # on a ROCm device too, which torch calls "cuda"
        resolved = resolved.cpu()
    shape = tuple(tensor.shape)
    storage_shape = logical.storage_shape(shape)
    strides = tuple(stride * resolved.element_size() for stride in resolved.stride())
    block = Block(
        (0,) * len(storage_shape),
        storage_shape,
        logical.storage_strides(strides),
        resolved.data_ptr(),
        resolved,
        resolved.device.index if resolved.device.type == "cuda" else -1,
    )
    on_cpu = tensor.device.type == "cpu"
    return ArraySource(
        shape,
        logical.name,
        "torch",
        logical.storage,
        storage_shape,
        storage_item_bytes=logical.storage_item_bytes,
        blocks=[block],
        mutable=resolved.data_ptr() == tensor.data_ptr() or block.device >= 0,
        sharding=None if on_cpu else {"kind": "torch", "device": str(tensor.device)},
        extra={"requires_grad": True} if leaf.requires_grad and leaf.is_leaf else {},
    )


def _check_kind(leaf: torch.Tensor) -> None:
    """Raises for tensors that are not plain memory."""
    cls = type(leaf)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        pass
    elif cls.__name__ in ("DTensor", "FakeTensor"):
        _refuse_known(leaf)
    elif isinstance(leaf, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        raise InvalidInput("a lazy module's parameter has no data yet; run the module once before saving")
    elif cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise Unsupported(
            f"a {cls.__module__}.{cls.__qualname__} wraps other tensors; save the tensors that it holds, or "
            "convert it to a plain one first"
        )
    if leaf.is_nested:
        raise Unsupported("nested tensors cannot be saved; save the tensors of leaf.unbind() as a list")
    if leaf.layout is not torch.strided:
        raise Unsupported(
            f"tensors with the layout {leaf.layout} cannot be saved; save leaf.to_dense(), or its "
            "indices and values"
        )
    if leaf.device.type == "meta":
        raise InvalidInput("a tensor on the meta device has no data; save the materialised module")


def _refuse_known(leaf: torch.Tensor) -> None:
    if type(leaf).__name__ == "FakeTensor":
        raise InvalidInput("a fake tensor has no data; save the real one")
    raise Unsupported(
        "DTensors come with the distributed part; until then save leaf.full_tensor() from one process"
    )


def _logical_of(tensor: torch.Tensor) -> dtypes.LogicalDtype:
    found = _LOGICAL.get(tensor.dtype)
    if found is not None:
        return found
    if tensor.is_quantized:
        raise Unsupported(
            f"quantized tensors ({tensor.dtype}) cannot be saved; save leaf.int_repr() with its scale and "
            "zero point, or leaf.dequantize()"
        )
    raise Unsupported(f"tensors of {tensor.dtype} cannot be saved or loaded; use leaf.view(torch.uint8)")


# ---- loading -----------------------------------------------------------------------------------


def _whole(stored: StoredArray, dtype: str, place: Placement) -> Target:
    dtypes.of_stored(stored)
    wanted = _torch_dtype(dtype)
    if place.requires_grad and not (wanted.is_floating_point or wanted.is_complex):
        raise InvalidInput(f"a tensor of {dtype} cannot require a gradient")
    shape = tuple(stored.shape)
    return Target(shape, dtype, [((0,) * len(shape), shape)], place)


def _torch_dtype(name: str) -> torch.dtype:
    found = _BY_NAME.get(name)
    if found is None:
        raise Unsupported(
            f"torch has no dtype {name}; ask for another dtype in the abstract state, or load it as NumPy"
        )
    return found


def _present(device: torch.device) -> torch.device:
    """Where a tensor goes that an abstract one on `device` asks for."""
    if device.type == "meta":
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"the abstract tensor is on {device}, this process has {torch.cuda.device_count()} CUDA devices; "
            "give one on a device that is here, or on the meta device for the CPU"
        )
    return device


def _saved_device(stored: StoredArray) -> torch.device:
    text = stored.sharding.get("device") if stored.sharding else None
    if not isinstance(text, str):
        return torch.device("cpu")
    kind, _, number = text.partition(":")
    ordinal = int(number) if number.isascii() and number.isdigit() else 0
    if kind == "cuda" and ordinal < torch.cuda.device_count():
        return torch.device(kind, ordinal)
    return torch.device("cpu")


def _over(buffer: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """A tensor that shares the buffer's memory; a copy of read-only memory, which torch cannot keep so."""
    if not buffer.flags.writeable:
        buffer = buffer.copy()
    if dtype in _DIRECT:
        return torch.from_numpy(buffer)
    # What from_numpy does not know goes through an integer of its size.
    wanted = _torch_dtype(dtype)
    size = buffer.dtype.itemsize
    if size in _INTEGER_OF_SIZE:
        return torch.from_numpy(buffer.view(_INTEGER_OF_SIZE[size])).view(wanted)
    return torch.from_numpy(buffer)


CODEC = TorchCodec()
