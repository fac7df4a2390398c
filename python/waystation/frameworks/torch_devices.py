"""torch tensors in the memory of CUDA devices, which the engine fills.

Small tensors share pieces of memory of at most 64 MiB, so that one survivor can keep no more than that;
larger ones have their own. Invariants: every tensor begins at a multiple of 256 bytes; memory is handed to
the engine only once no kernel uses it any more, since torch hands out again what kernels may still be
reading; nobody sees a tensor before all of it is there. Casts are those that any device rounds in the same
way, once; a number that overflows is an error, as on the host.

For loads with little host memory, tensors are put together on their device piece by piece (`PieceWriter`). A
piece is no longer needed on the host once `put` returns; beside the tensor, its device holds at most one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from waystation._errors import LossyCast, Unavailable
from waystation.frameworks import torch_in_place, torch_memory
from waystation.frameworks.base import CastRule, DeviceArrays, Target
from waystation.grid import slices_of_box, volume

ALIGN_BYTES = 256
OWN_BYTES = 1 << 20
SHARED_BYTES = 64 << 20
_CHECKED = 1 << 22  # elements that are compared at a time

# What each dtype is cast to on devices. Torch rounds 64 bits to 32 on the way to 16, the host does not.
_HALVES = frozenset({"float16", "bfloat16"})
_CASTS = {name: _HALVES | {"float32", "float64"} for name in ("float16", "bfloat16", "float32")}
_CASTS["float64"] = frozenset({"float32"})


def goes_to_devices(target: Target, stored_dtype: str) -> bool:
    """Whether the engine can bring a tensor to its device: one of NVIDIA's, and in one box, which is all that
    this process holds of a DTensor."""
    place = target.placement
    if place.device.type != "cuda" or torch.version.hip is not None or len(target.boxes) != 1:
        return False
    _, shape = target.boxes[0]
    if math.prod(shape) == 0 or (place.form is not None and place.form.shard.shape != shape):
        return False
    return stored_dtype == target.dtype or target.dtype in _CASTS.get(stored_dtype, ())


def on_devices(targets: Sequence[Target], stored_dtypes: Sequence[str], rule: CastRule) -> DeviceArrays:
    """Tensors there, to be filled; they may be stored in other dtypes.

    Raises:
        Unavailable: A device has not enough memory.
    """
    return _DeviceArrays(targets, stored_dtypes, rule)


class _DeviceArrays:
    """Tensors in the making, see `frameworks.base.DeviceArrays`."""

    def __init__(self, targets: Sequence[Target], stored_dtypes: Sequence[str], rule: CastRule) -> None:
        self._targets = targets
        self._rule = rule
        self._dtypes = [torch_memory.torch_dtype(name) for name in stored_dtypes]
        self._bytes: list[torch.Tensor | None] = [None] * len(targets)
        self.regions: list[tuple[int, int, int]] = []
        devices = {target.placement.device for target in targets}
        ordinals = {
            device: torch.empty(0, device=device).get_device() for device in devices
        }  # "cuda" has none
        by_device: dict[int, list[int]] = {}
        for number, target in enumerate(targets):
            by_device.setdefault(ordinals[target.placement.device], []).append(number)
        for ordinal, numbers in by_device.items():
            self._allocate(ordinal, numbers)
        for ordinal in by_device:
            torch.cuda.current_stream(ordinal).synchronize()
        self.places = [[(0, tensor.data_ptr())] for tensor in self._bytes if tensor is not None]

    def _allocate(self, ordinal: int, numbers: Sequence[int]) -> None:
        device = torch.device("cuda", ordinal)
        sizes = [volume(self._targets[number].boxes[0]) * self._dtypes[number].itemsize for number in numbers]
        try:
            _reserve(sum(size + 2 * ALIGN_BYTES for size in sizes), device)
            pieces, places = carve(
                sizes, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
            )
        except torch.cuda.OutOfMemoryError as error:
            raise Unavailable(
                f"{device} has not enough memory for {sum(sizes)} bytes of tensors: {error}; load fewer of "
                "them, or free memory first"
            ) from error
        self.regions += [(ordinal, piece.data_ptr(), piece.numel()) for piece in pieces]
        for number, own in zip(numbers, places, strict=True):
            self._bytes[number] = own

    def take(self, number: int) -> torch.Tensor:
        """A tensor, once its memory is filled; one that is cast leaves it."""
        own, self._bytes[number] = self._bytes[number], None
        assert own is not None
        target, dtype = self._targets[number], self._dtypes[number]
        tensor = as_tensor(own, dtype, target.boxes[0][1])
        wanted = torch_memory.torch_dtype(target.dtype)
        found: torch.Tensor = target.placement.finished(
            tensor if dtype == wanted else cast(tensor, wanted, self._rule)
        )
        return found


def cast(tensor: torch.Tensor, wanted: torch.dtype, rule: CastRule) -> torch.Tensor:
    """A tensor of floats as one of other floats.

    Raises:
        LossyCast: A number has become infinity, and the rule forbids it.
    """
    found = tensor.to(wanted)
    most = torch.finfo(wanted).max
    if rule.may_lose or torch.finfo(tensor.dtype).max <= most or not tensor.numel():
        return found
    least, greatest = torch.aminmax(found)
    if bool(torch.isfinite(least)) and bool(torch.isfinite(greatest)):
        return found
    parts = torch.split(tensor.flatten(), _CHECKED), torch.split(found.flatten(), _CHECKED)
    for before, after in zip(*parts, strict=True):
        is_lost = torch.isinf(after) & torch.isfinite(before)
        if bool(is_lost.any()):
            first, stored, held = before[is_lost][0].item(), _name(tensor.dtype), _name(wanted)
            raise LossyCast(
                f"the value {first} was saved as {stored}, and {held} holds numbers from {-most:.8g} to "
                f"{most:.8g}; ask for a wider dtype, or set {rule.option}"
            )
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def carve(
    sizes: Sequence[int], allocate: Callable[[int], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Memory for buffers of the given bytes.

    Args:
        sizes: Their bytes, none 0.
        allocate: Gives so many bytes, at a multiple of `ALIGN_BYTES`.

    Returns:
        What was allocated, and what each buffer has of it.
    """
    pieces: list[torch.Tensor] = []
    places: list[torch.Tensor | None] = [None] * len(sizes)
    group: list[tuple[int, int]] = []  # small buffers, and where they begin in the piece that they share
    held = 0

    def share() -> None:
        pieces.append(allocate(held))
        for number, start in group:
            places[number] = pieces[-1][start : start + sizes[number]]

    for number, nbytes in enumerate(sizes):
        if nbytes >= OWN_BYTES:
            pieces.append(allocate(nbytes))
            places[number] = pieces[-1]
            continue
        if held + nbytes > SHARED_BYTES:
            share()
            group, held = [], 0
        group.append((number, held))
        held += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    if group:
        share()
    return pieces, [place for place in places if place is not None]


def as_tensor(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor."""
    return data.view(dtype).view(tuple(shape))


def _reserve(nbytes: int, device: torch.device) -> None:
    """Has torch take all memory from the driver at once, which is slow to give it: of what torch has been
    given back it then serves tensor after tensor."""
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) >= nbytes:
        return
    with contextlib.suppress(torch.cuda.OutOfMemoryError):  # in several pieces there may be enough
        torch.empty(nbytes, dtype=torch.uint8, device=device)


def stays_on_host(target: Target) -> bool:
    """Whether a tensor is made of host memory as it was read: one box, on the CPU."""
    return target.placement.device.type == "cpu" and len(target.boxes) <= 1


def goes_in_pieces(target: Target) -> bool:
    """Whether pieces can be written into a tensor on its device."""
    return target.dtype not in torch_in_place.NOT_COPIED and math.prod(target.shape) > 0


class PieceWriter:
    """Puts one tensor together on its device."""

    def __init__(self, target: Target) -> None:
        place = target.placement
        shard = None if place.form is None else place.form.shard
        shape = target.shape if shard is None else shard.shape
        self._places = [(0,) * len(shape)] if shard is None else shard.places
        self._target = target
        self._tensor = torch.empty(shape, dtype=torch_memory.torch_dtype(target.dtype), device=place.device)

    def put(self, box_number: int, offset: tuple[int, ...], values: np.ndarray[Any, Any]) -> None:
        """Places a part of a box of the target, `offset` counted from the box; returns once the host
        memory of `values` is no longer needed."""
        start = tuple(at + begin for at, begin in zip(offset, self._places[box_number], strict=True))
        own = slices_of_box((start, values.shape))
        self._tensor[own].copy_(torch_memory.over(values, self._target.dtype))

    def finish(self) -> torch.Tensor:
        """The tensor, once all of it has been put."""
        made: torch.Tensor = self._target.placement.finished(self._tensor)
        return made
