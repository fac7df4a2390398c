"""Tensors put together on their device, piece by piece, for loads with little host memory.

Invariants: a piece is no longer needed on the host once `put` returns; beside the tensor, its device holds
at most one piece.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from waystation.frameworks import torch_in_place, torch_memory
from waystation.frameworks.base import Target
from waystation.grid import slices_of_box


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
