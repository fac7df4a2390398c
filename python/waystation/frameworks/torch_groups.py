"""What loaders need of a process group of torch: tensors of every dtype from one process to others.

Tensors travel as the bytes that they are, since no backend knows all dtypes. Invariants: all processes of a
group make the same calls in the same order, as for any collective; what has no elements is never sent;
processes are named by their rank within the group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

from waystation._errors import InvalidInput
from waystation.coordination import error_codec
from waystation.frameworks import torch_memory

T = TypeVar("T")


def of_group(group: Any) -> TorchGroup:
    """A process group as it is used here; None stands for this process alone.

    Raises:
        InvalidInput: It is no process group, or this process is not in it.
    """
    if group is None:
        return TorchGroup(None)
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise InvalidInput(
            f"a {type(group).__name__} is no process group; give one of torch.distributed "
            "(torch.distributed.group.WORLD is that of all processes), or None for this process alone"
        )
    return TorchGroup(group)


class TorchGroup:
    """A process group, or a process alone.

    Attributes:
        group: The process group; None for a process alone.
        size: The number of its processes.
        rank: Which of them this is.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size: int = 1 if group is None else group.size()
        self.rank: int = 0 if group is None else group.rank()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fills a contiguous tensor with what that of the source has."""
        if self.size > 1 and tensor.numel():
            distributed.broadcast(as_bytes(tensor), group=self.group, group_src=source)

    def broadcast_joined(
        self,
        tensors: Sequence[torch.Tensor] | None,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[str],
        source: int,
        device: str,
        align_bytes: int,
    ) -> list[torch.Tensor]:
        """Tensors that one process has, in all, in one message. They share memory with each other.

        Args:
            tensors: What is sent, in the source.
            shapes: Of the tensors.
            dtypes: Of their elements, logical.
            source: Who has them.
            device: Where they go.
            align_bytes: Each begins at a multiple of so many bytes.
        """
        kinds = [torch_memory.torch_dtype(dtype) for dtype in dtypes]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        rooms = [-(-nbytes // align_bytes) * align_bytes for nbytes in sizes]
        flat = torch.empty(sum(rooms), dtype=torch.uint8, device=device)
        begins = list(itertools.accumulate(rooms, initial=0))
        for tensor, begin, nbytes in zip(tensors or (), begins, sizes, strict=False):
            flat[begin : begin + nbytes].copy_(bytes_in_order(tensor))
        self.broadcast(flat, source)
        return [
            flat[begin : begin + nbytes].view(kind).reshape(tuple(shape))
            for begin, nbytes, kind, shape in zip(begins, sizes, kinds, shapes, strict=False)
        ]

    def scatter(self, parts: Sequence[torch.Tensor], own: torch.Tensor, source: int, most_bytes: int) -> None:
        """Fills a contiguous tensor in each process with its part of what the source has.

        Args:
            parts: What the source sends, by rank; empty elsewhere.
            own: What is filled.
            source: Who sends.
            most_bytes: Bytes of the largest part.
        """
        if not most_bytes:
            return
        # Backends want parts of one size; the last ones of a tensor may be smaller.
        nbytes = own.numel() * own.element_size()
        padded = own if nbytes == most_bytes else own.new_empty(most_bytes, dtype=torch.uint8)
        sent = [_padded(part, most_bytes) for part in parts] if self.rank == source else None
        distributed.scatter(as_bytes(padded), sent, group=self.group, group_src=source)
        if padded is not own and nbytes:
            as_bytes(own).copy_(padded[:nbytes])

    def exchange(
        self, parts: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], device: str
    ) -> torch.Tensor:
        """Sends bytes to every process, and receives some of every process.

        Args:
            parts: What goes to each, by rank: arrays of bytes of any strides.
            sizes: How many bytes come from each.
            device: Where they go.

        Returns:
            The bytes of all processes, one after another.
        """
        lengths = [sum(part.numel() for part in own) for own in parts]
        sent = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        begin = 0
        for part in (part for own in parts for part in own):
            sent[begin : begin + part.numel()].view(part.shape).copy_(part)
            begin += part.numel()
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        distributed.all_to_all_single(received, sent, list(sizes), lengths, group=self.group)
        return received

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> None:
        """Sends a tensor to one process, which receives it."""
        if tensor.numel():
            distributed.send(bytes_in_order(tensor), group=self.group, group_dst=destination, tag=tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Fills a contiguous tensor with what one process sends."""
        if tensor.numel():
            distributed.recv(as_bytes(tensor), group=self.group, group_src=source, tag=tag)

    def gather(self, value: T) -> list[T]:
        """A small value of every process, in all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def agree_on(self, text: str) -> None:
        """Raises InvalidInput, in all processes, unless all give the same text."""
        texts = self.gather(text)
        other = next((rank for rank, found in enumerate(texts) if found != texts[0]), None)
        if other is not None:
            raise InvalidInput(
                f"process {other} of the group was given other files or arguments than process 0; give "
                "all of them the same"
            )

    def attempt(self, work: Callable[[], T]) -> T:
        """Does something that can fail in one process and not in others; then all go on, or none.

        Raises:
            WaystationError: The work failed in some process. That one raises its error as it is, the others
                the error of the first that failed: of the same class and message, with its rank as `process`
                in the context and its traceback as a note.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failures = self.gather(None if failure is None else error_codec.encode(failure, self.rank))
        if failure is not None:
            raise failure
        first = next((encoded for encoded in failures if encoded is not None), None)
        if first is not None:
            raise error_codec.decode(first)
        return result


def even_blocks(extent: int, count: int) -> list[range]:
    """An axis as so many blocks, even and rounded up: the last ones may be smaller, or empty."""
    step = -(-extent // count)
    return [range(min(rank * step, extent), min((rank + 1) * step, extent)) for rank in range(count)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def bytes_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any strides, copied if they do not follow one another."""
    # torch copies no elements of some narrow dtypes, but any bytes.
    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return as_bytes(plain.contiguous())


def byte_array(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as an array of bytes, in the same memory: those of an element are its last axis."""
    return as_bytes(tensor).reshape(*tensor.shape, tensor.element_size())


def _padded(part: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes of a tensor, and others after them."""
    data = bytes_in_order(part)
    if data.numel() == nbytes:
        return data
    padded = data.new_empty(nbytes)
    padded[: data.numel()].copy_(data)
    return padded


def empty(shape: Sequence[int], dtype: str, device: str) -> torch.Tensor:
    """A tensor whose elements are not set; the dtype is a logical one."""
    return torch.empty(tuple(shape), dtype=torch_memory.torch_dtype(dtype), device=device)


def concatenated(tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Tensors of one dtype, one after another along an axis."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(list(tensors), dim=axis)
    # torch joins no narrow floats on some devices, but any bytes.
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors], dim=axis).view(dtype)


def use_device(device: str) -> None:
    """Makes a GPU the one that collectives of this thread use."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


def converted(tensor: torch.Tensor, device: str | None, dtype: str | None) -> torch.Tensor:
    """A tensor on another device, of another dtype, or both."""
    return tensor.to(device=device, dtype=None if dtype is None else torch_memory.torch_dtype(dtype))


def finished(device: str) -> None:
    """Waits for what the present stream of a GPU has to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def place_in_program() -> tuple[int, int] | None:
    """Which process this is, and of how many, in a program of torch; None where there is none."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()
