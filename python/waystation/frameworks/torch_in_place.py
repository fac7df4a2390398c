"""Tensors that are loaded into: which can be, where their memory is, and how they take values.

Invariants: a tensor stays what it is, a parameter a parameter; autograd is told that it has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.graph import increment_version

from waystation._errors import InvalidInput, WaystationError
from waystation.frameworks.base import Target

# torch cannot copy these between tensors.
NOT_COPIED = frozenset({"complex32", "bcomplex32", "float4_e2m1fn_x2"})


def loaded_into(abstracts: Sequence[Any], targets: Sequence[Target]) -> list[Target]:
    """The targets with the tensors that have memory.

    Raises:
        InvalidInput: A tensor cannot take values; `index` names it.
    """
    found = []
    for index, (abstract, target) in enumerate(zip(abstracts, targets, strict=True)):
        try:
            found.append(_with(target, abstract))
        except WaystationError as error:
            raise error.where(index=index)
    return found


def _with(target: Target, tensor: torch.Tensor) -> Target:
    own = local(tensor, target)
    if own.device.type == "meta":
        return target
    if own.layout is not torch.strided or own.is_nested:
        raise InvalidInput(
            f"a tensor with the layout {own.layout} cannot be loaded into; give a dense one (to_dense)"
        )
    if own.numel() and any(
        stride == 0 and extent > 1 for stride, extent in zip(own.stride(), own.shape, strict=True)
    ):
        raise InvalidInput(
            "a tensor of which several elements are the same memory, as expand makes it, cannot be loaded "
            "into; give a copy of it (clone)"
        )
    if target.dtype in NOT_COPIED and not own.is_contiguous():
        raise InvalidInput(f"a tensor of {target.dtype} can be loaded into only where it is contiguous")
    return replace(target, into=tensor)


def local(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """What this process has of a tensor, without a gradient."""
    own: Any = tensor.detach()
    part: torch.Tensor = own if target.placement.form is None else own.to_local()
    return part


def may_write(array: object) -> bool:
    """Whether a plain tensor can be written to."""
    return True


def wrote(owners: Sequence[Any]) -> None:
    """Tells autograd, by detached tensors, which share their versions with others."""
    for owner in owners:
        increment_version(owner)


def memory_of(target: Target) -> NDArray[np.uint8] | None:
    """The memory of a tensor on the CPU that lies as the box that is read."""
    own = local(target.into, target)
    if own.device.type != "cpu" or own.numel() == 0 or not own.is_contiguous():
        return None
    if own.is_conj() or own.is_neg() or len(target.boxes) != 1 or tuple(own.shape) != target.boxes[0][1]:
        return None
    memory: NDArray[np.uint8] = own.reshape(-1).view(torch.uint8).numpy()
    return memory


def span_of(target: Target) -> tuple[int, int] | None:
    """Where a tensor on the CPU or on a GPU of CUDA begins and ends, if its memory is in one piece."""
    own = local(target.into, target)
    if own.device.type not in ("cpu", "cuda") or own.numel() == 0:
        return None
    last = sum((extent - 1) * stride for extent, stride in zip(own.shape, own.stride(), strict=True))
    begin = own.data_ptr()
    return (begin, begin + own.nbytes) if last + 1 == own.numel() else None


def put_into(target: Target, leaf: Any) -> torch.Tensor:
    """The tensor, with the values of another of the same kind."""
    tensor: torch.Tensor = target.into
    own, values = local(tensor, target), local(leaf, target)
    if own.numel() == 0:
        return tensor
    if own.data_ptr() == values.data_ptr():
        increment_version(own)  # which it shares with the tensor
    elif target.dtype in NOT_COPIED:
        _as_bytes(own).copy_(_as_bytes(values))
    else:
        own.copy_(values)
    return tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
