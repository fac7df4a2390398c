"""Tensors as the API wraps them, and process groups: what stands between it and torch.

Invariants: shapes are those of the wrapped tensor's library, in which a packed element counts bytes, except
where a method says otherwise; nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from waystation._errors import InvalidInput, Unsupported
from waystation.compat.fastsafetensors.common import SingleGroup
from waystation.compat.fastsafetensors.st_types import Device, DType, dtype_of_logical, logical_name
from waystation.safetensors.making import codec_of

_TORCH = ("pytorch", "pt", "torch")


@dataclass
class TensorBase:
    """A tensor, its device and its dtype.

    Attributes:
        device: Where it is.
        dtype: Of its elements.
        real_tensor: The tensor of the framework.
    """

    device: Device
    dtype: DType
    real_tensor: Any

    def get_raw(self) -> Any:
        """The tensor of the framework."""
        return self.real_tensor

    def get_shape(self) -> list[int]:
        """The shape as files have it: in elements, also of packed ones."""
        shape = list(self.real_tensor.shape)
        if self.dtype is DType.F4:
            shape[-1] *= 2
        return shape

    def get_nbytes(self) -> int:
        """Bytes of its elements."""
        return int(self.real_tensor.nbytes)

    def data_ptr(self) -> int:
        """The address of its first element."""
        return int(self.real_tensor.data_ptr())

    def copy_to_buffer(self, buf: memoryview) -> None:
        """Copies its elements, in order."""
        data = torch_groups().bytes_in_order(self.real_tensor.detach()).cpu().numpy()
        buf[: data.nbytes] = memoryview(data)

    def contiguous(self) -> TensorBase:
        """The same with elements that follow one another."""
        return self._with(self.real_tensor.contiguous())

    def clone(self) -> TensorBase:
        """A copy."""
        return self._with(self.real_tensor.clone())

    def detach(self) -> TensorBase:
        """The same without a gradient."""
        return self._with(self.real_tensor.detach())

    def reshape(self, shape: Sequence[int]) -> TensorBase:
        """The same in another shape."""
        return self._with(self.real_tensor.reshape(tuple(shape)))

    def __getitem__(self, index: Any) -> TensorBase:
        return self._with(self.real_tensor[index])

    def view(self, dtype: DType) -> TensorBase:
        """The same bytes as another dtype."""
        viewed = self.real_tensor.view(torch_dtype(dtype))
        return TensorBase(self.device, dtype, viewed)

    def to(self, device: Device | None = None, dtype: DType = DType.AUTO) -> TensorBase:
        """The same on another device, of another dtype, or both."""
        place = self.device if device is None else device
        wanted = self.dtype if dtype is DType.AUTO else dtype
        if place == self.device and wanted is self.dtype:
            return self
        moved = torch_groups().converted(
            self.real_tensor,
            None if place == self.device else place.as_str(),
            None if wanted is self.dtype else logical_name(wanted),
        )
        return TensorBase(place, wanted, moved)

    def _with(self, tensor: Any) -> TensorBase:
        return TensorBase(self.device, self.dtype, tensor)


def wrapped(tensor: Any) -> TensorBase:
    """A tensor of torch as the API has it."""
    if isinstance(tensor, TensorBase):
        return tensor
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorBase(Device.from_str(str(tensor.device)), dtype_of_logical(name), tensor)


def torch_dtype(dtype: DType) -> Any:
    """The dtype of torch."""
    codec_of("torch")
    from waystation.frameworks import torch_memory

    return torch_memory.torch_dtype(logical_name(dtype))


def packed_shape(dtype: DType, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that torch has for a shape in a file.

    Raises:
        ValueError: Packed elements do not fill their last byte.
    """
    if dtype is not DType.F4:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise InvalidInput(f"F4 of the shape {tuple(shape)} does not fill whole bytes along its last axis")
    return (*shape[:-1], shape[-1] // 2)


def check_framework(name: str) -> None:
    """Raises Unsupported unless a framework is torch, and here."""
    if name not in _TORCH:
        raise Unsupported(
            f"this loads into torch, not into {name!r:.60}; waystation.safetensors has JAX and NumPy, too"
        )
    codec_of("torch")


def torch_groups() -> Any:
    """What knows tensors and process groups of torch."""
    codec_of("torch")
    from waystation.frameworks import torch_groups as found

    return found


class ProcessGroup:
    """A group of processes.

    Args:
        group: A process group of torch; a `SingleGroup` or None for this process alone; or one of these.

    Attributes:
        real_pg: The process group of torch, if it is one.
        collectives: What communicates.
    """

    def __init__(self, group: Any) -> None:
        real: Any = group.real_pg if isinstance(group, ProcessGroup) else group
        self.real_pg: Any = None if isinstance(real, SingleGroup) else real
        self.collectives: Any = torch_groups().of_group(self.real_pg)

    def size(self) -> int:
        """The number of processes."""
        return int(self.collectives.size)

    def rank(self) -> int:
        """Which of them this is."""
        return int(self.collectives.rank)
