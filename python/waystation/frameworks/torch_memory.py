"""Plain torch tensors as memory: what may be read as it lies, and tensors over filled buffers.

Invariants: CPU and CUDA memory is never copied here, only named; what torch does not lay out by strides
(sparse, nested, quantized, wrapped tensors) is refused, with what to save instead; tensors made here share
memory with their buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from waystation import _native
from waystation._errors import InvalidInput, Unsupported, UnsupportedLeaf
from waystation.frameworks import dtypes
from waystation.frameworks.base import Block

# torch also names int2, uint4 and their like, but has no arithmetic or storage for them.
_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in dtypes.TABLE
    if name not in dtypes.SUB_BYTE and isinstance(getattr(torch, name, None), torch.dtype)
}
_LOGICAL: dict[torch.dtype, dtypes.LogicalDtype] = {
    dtype: dtypes.TABLE[name] for name, dtype in _BY_NAME.items()
}
_INTEGER_OF_SIZE: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
# Type codes and bits (dlpack.h) of the dtypes that every release of torch takes from a DLPack capsule.
_DLPACK = {
    "bool": (6, 8),
    "int8": (0, 8),
    "int16": (0, 16),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float16": (2, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
}
_DIRECT = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"})


# ---- dtypes ------------------------------------------------------------------------------------


def logical_of(tensor: torch.Tensor) -> dtypes.LogicalDtype:
    """The logical dtype of a tensor.

    Raises:
        UnsupportedLeaf: There is none.
    """
    found = _LOGICAL.get(tensor.dtype)
    if found is not None:
        return found
    if tensor.is_quantized:
        raise UnsupportedLeaf(
            f"quantized tensors ({tensor.dtype}) cannot be saved; save leaf.int_repr() with its scale and "
            "zero point, or leaf.dequantize()"
        )
    raise UnsupportedLeaf(f"tensors of {tensor.dtype} cannot be saved or loaded; use leaf.view(torch.uint8)")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch has for a logical name.

    Raises:
        Unsupported: torch has none.
    """
    found = _BY_NAME.get(name)
    if found is None:
        raise Unsupported(f"torch has no dtype {name}; ask for another dtype, or load it as NumPy")
    return found


@lru_cache(maxsize=256)  # states have few dtypes and many tensors
def check_gradient(dtype: str, requires_grad: bool) -> None:
    """Raises unless torch has the dtype, and gradients of it if one is required."""
    wanted = torch_dtype(dtype)
    if requires_grad and not (wanted.is_floating_point or wanted.is_complex):
        raise InvalidInput(f"a tensor of {dtype} cannot require a gradient")


# ---- reading -----------------------------------------------------------------------------------


def check_readable(leaf: torch.Tensor) -> None:
    """Raises for tensors that are not plain memory."""
    cls = type(leaf)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        pass
    elif cls.__name__ == "FakeTensor":
        raise InvalidInput("a fake tensor has no data; save the real one")
    elif isinstance(leaf, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        raise InvalidInput("a lazy module's parameter has no data yet; run the module once before saving")
    elif cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedLeaf(
            f"a {cls.__module__}.{cls.__qualname__} wraps other tensors; save the tensors that it holds, or "
            "convert it to a plain one first"
        )
    if leaf._is_zerotensor():
        raise UnsupportedLeaf("a tensor of zeros without memory cannot be saved; save torch.zeros_like(leaf)")
    if leaf.is_nested:
        raise UnsupportedLeaf("nested tensors cannot be saved; save the tensors of leaf.unbind() as a list")
    if leaf.layout is not torch.strided:
        raise UnsupportedLeaf(
            f"tensors with the layout {leaf.layout} cannot be saved; save leaf.to_dense(), or its "
            "indices and values"
        )
    if leaf.device.type == "meta":
        raise InvalidInput("a tensor on the meta device has no data; save the materialised module")


def is_contiguous(leaf: torch.Tensor) -> bool:
    """Whether a tensor is plain memory of the CPU, in C order."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
        and leaf.is_cpu
        and not (leaf.is_nested or leaf._is_zerotensor() or leaf.is_conj() or leaf.is_neg())
        and leaf.is_contiguous()
    )


def block_of(
    tensor: torch.Tensor, logical: dtypes.LogicalDtype, offset: tuple[int, ...]
) -> tuple[Block, bool]:
    """A block over the elements of a readable tensor, and whether the user can change them in place.

    Args:
        tensor: Without a gradient of its own.
        logical: Its dtype.
        offset: Of the block, in logical elements.
    """
    resolved = tensor.resolve_conj().resolve_neg()
    on = tensor.device.type
    if on == "cuda" and torch.version.hip is None:
        resolved = resolved.contiguous()
    elif on != "cpu":  # on a ROCm device too, which torch calls "cuda"
        resolved = resolved.cpu()
    device = resolved.device
    item_bytes = resolved.element_size()
    block = Block(
        offset + (0,) * len(logical.trailing),
        logical.storage_shape(tuple(tensor.shape)),
        logical.storage_strides(tuple([stride * item_bytes for stride in resolved.stride()])),
        resolved.data_ptr(),
        resolved,
        device.index if device.type == "cuda" else -1,
    )
    return block, block.device >= 0 or block.address == tensor.data_ptr()


def describe_device(device: torch.device) -> dict[str, Any] | None:
    """The sharding of a tensor that one device holds whole; None on the CPU."""
    return None if device.type == "cpu" else {"kind": "torch", "device": str(device)}


# ---- making ------------------------------------------------------------------------------------


def over(buffer: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """A tensor that shares the buffer's memory; a copy of read-only memory, which torch cannot keep so."""
    if not buffer.flags.writeable:
        buffer = buffer.copy()
    if dtype in _DIRECT:
        return torch.from_numpy(buffer)
    # What from_numpy does not know goes through an integer of its size.
    wanted = torch_dtype(dtype)
    size = buffer.dtype.itemsize
    if size in _INTEGER_OF_SIZE:
        return torch.from_numpy(buffer.view(_INTEGER_OF_SIZE[size])).view(wanted)
    return torch.from_numpy(buffer)


def is_made_over_memory(dtype: str) -> bool:
    """Whether `tensors_over` makes tensors of a logical dtype."""
    return dtype in _DLPACK


def tensors_over(
    slabs: Sequence[_native.Slab | None],
    offsets: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
) -> list[torch.Tensor]:
    """Tensors over parts of slabs, each with a storage of its own, whose memory may still be written."""
    codes = [_DLPACK[dtype] for dtype in dtypes]
    return list(map(from_dlpack, _native.dlpack_capsules(slabs, offsets, shapes, codes)))


def without_data(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device."""
    # Half-width complex dtypes warn wherever a tensor of them is made, though not where one is viewed.
    plain = torch.int32 if dtype.is_complex and dtype.itemsize == 4 else dtype
    return torch.empty(shape, dtype=plain, device="meta").view(dtype)
