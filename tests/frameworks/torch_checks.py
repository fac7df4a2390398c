"""What the cases of torch_program.py check, in every process of the program."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as distributed
from tests.frameworks.store import Saved, bits, described, load, memory_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from waystation.frameworks import registry
from waystation.grid import find_cover_defect


def codec() -> Any:
    return registry.codec_by_name("torch")


def everyone(value: Any) -> list[Any]:
    """The values of all processes."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def refused(kind: type[Exception], words: str, function: Callable[[], Any]) -> None:
    """Asserts that a call raises."""
    with pytest.raises(kind, match=re.escape(words)):
        function()


def counted(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements differ as far as its dtype goes."""
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """What torch makes of a tensor that every process has, without communication."""
    local = full
    at = mesh.get_coordinate()
    for size, placement, index in zip(mesh.shape, placements, at or (), strict=at is not None):
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, size, with_padding=False)[0][index]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, whatever its dtype."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return bits(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def saved_by_all(leaf: Any) -> tuple[Any, Saved]:
    """The source of a leaf here, and the whole array as the blocks of all processes make it, after checks
    that what each holds is what its spread says."""
    (source,) = codec().sources([leaf])
    spread = source.spread
    assert all(other == spread for other in everyone(spread))
    assert spread.array_shape == source.shape
    assert find_cover_defect(source.shape, spread.boxes) is None
    item_bytes = source.storage_item_bytes
    blocks = [
        (block.offset, block.shape, memory_of(block, item_bytes).copy())
        for block in source.blocks
        if math.prod(block.shape)
    ]
    rank, axes = distributed.get_rank(), len(source.shape)
    held = [box for box, group in zip(spread.boxes, spread.holders, strict=True) if rank in group]
    if math.prod(source.shape):
        assert [(offset[:axes], shape[:axes]) for offset, shape, _ in blocks] == held
    data = np.zeros(source.storage_shape, f"V{item_bytes}")
    for offset, shape, content in (block for others in everyone(blocks) for block in others):
        cut = tuple(slice(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))
        data[cut] = content
    return source, Saved(described(source), data)


def check(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any], *, gather: bool = True) -> None:
    """A DTensor through sources, and through targets back from an array that is there whole."""
    leaf = distribute(full, mesh, placements)
    source, saved = saved_by_all(leaf)
    assert bits(saved.data) == raw(full)
    meta = distribute(full.to("meta"), mesh, placements)
    shown = codec().abstract(saved.stored)
    for loaded in (load(saved, leaf), load(saved, meta), load(saved), load(saved, shown)):
        same(loaded, leaf)
    assert load(saved, leaf).device_mesh is mesh
    inside = mesh.get_coordinate() is not None
    assert bool(source.blocks) <= inside
    if gather and inside:
        assert raw(load(saved, meta).full_tensor()) == raw(full)


def same(loaded: DTensor, leaf: DTensor) -> None:
    assert type(loaded) is DTensor
    assert (loaded.shape, loaded.dtype, loaded.placements) == (leaf.shape, leaf.dtype, leaf.placements)
    assert loaded.device_mesh == leaf.device_mesh
    assert loaded.to_local().shape == leaf.to_local().shape
    assert raw(loaded.to_local()) == raw(leaf.to_local())
