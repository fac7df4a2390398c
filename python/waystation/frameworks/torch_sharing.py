"""Torch tensors for files that hold every tensor whole: which share memory, and where their bytes are.

Invariants: two tensors are said to share memory only if one has a byte that the other has, too; memory is
never written to, and copied only where its bytes are not the tensor's elements in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from waystation._errors import InvalidInput
from waystation.frameworks import torch_memory


def sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of tensors that share memory, in groups of two at least, each in the order of addresses."""
    storages: dict[tuple[Any, int], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
            continue
        begin, end = _span(tensor)
        key = tensor.device, tensor.untyped_storage().data_ptr()
        storages.setdefault(key, []).append((begin, end, name))
    return [group for spans in storages.values() for group in _overlapping(sorted(spans)) if len(group) > 1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of that after the last one."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (1 + sum((extent - 1) * stride for extent, stride in steps)) * tensor.element_size()


def _overlapping(spans: list[tuple[int, int, str]]) -> list[list[str]]:
    """Names whose spans are connected, of spans in order."""
    groups: list[list[str]] = []
    reached = 0
    for begin, end, name in spans:
        if groups and begin < reached:
            groups[-1].append(name)
        else:
            groups.append([name])
        reached = max(reached, end)
    return groups


def is_whole_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has every byte of its storage."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr() == storage.data_ptr() and tensor.numel() * tensor.element_size() == len(storage)


def host_bytes(tensor: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    """The address and number of the bytes of a contiguous tensor in host memory, and what keeps them.

    Raises:
        InvalidInput: It has no data.
        Unsupported: It is no plain tensor.
    """
    torch_memory.check_readable(tensor)
    held = tensor.detach().resolve_conj().resolve_neg().cpu()
    return held.data_ptr(), held.numel() * held.element_size(), held


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of the dtype of a tensor, as torch has it."""
    return str(tensor.dtype).removeprefix("torch.")


def check_strided(name: str, tensor: Any) -> None:
    """Raises InvalidInput unless a value is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(
            f"a {type(tensor).__name__} was given, and only torch tensors go here", tensor=name
        )
    if tensor.layout is not torch.strided:
        raise InvalidInput(
            f"the tensor has the layout {tensor.layout}, and these files hold dense tensors; save its "
            "to_dense(), which may be much larger",
            tensor=name,
        )
