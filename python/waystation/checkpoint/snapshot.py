"""Snapshots: what makes an asynchronous save safe from later changes of the state.

Leaves that cannot change (JAX arrays on CPU, held by view) are not copied. Those that can (NumPy,
torch, GPU memory that may be donated) are copied into arena memory, up to a limit. What exceeds it is
what the engine copies out first, so the caller waits for that part only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from waystation import _native
from waystation._options import MemoryOptions
from waystation.frameworks.base import ArraySource, Block
from waystation.layouts.native import memory, write_plan


def take(sources: Sequence[ArraySource], options: MemoryOptions) -> int:
    """Copies what could change, as far as the limit allows, and repoints the sources to the copies.

    Returns:
        The plan position up to which the engine must have copied the sources out before the caller
        may change its leaves; 0 if everything that could change is a copy now.
    """
    order = write_plan.copy_order(sources)
    sizes = write_plan.sizes(sources)
    limit = _limit_bytes(options)
    chosen: list[int] = []
    drain: list[int] = []
    # What is copied out last would keep the caller waiting longest: that is copied first.
    for array in reversed(order):
        source = sources[array]
        if not sizes[array] or not _can_change(source, options):
            continue
        if sizes[array] <= limit:
            limit -= sizes[array]
            chosen.append(array)
        else:
            drain.append(array)
    _copy([block for array in chosen for block in sources[array].blocks], sources, chosen)
    if not drain:
        return 0
    last = max(map(order.index, drain))
    return sum(sizes[array] for array in order[: last + 1])


def _can_change(source: ArraySource, options: MemoryOptions) -> bool:
    # A JAX array is mutable where it may be donated away, in GPU memory: not what a caller promises.
    return source.mutable and (source.framework == "jax" or not options.caller_keeps)


def _limit_bytes(options: MemoryOptions) -> int:
    if options.snapshot_bytes is not None:
        return options.snapshot_bytes
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _copy(blocks: Sequence[Block], sources: Sequence[ArraySource], chosen: Sequence[int]) -> None:
    item_bytes = [sources[array].storage_item_bytes for array in chosen for _ in sources[array].blocks]
    sizes = [math.prod(block.shape) * item for block, item in zip(blocks, item_bytes, strict=True)]
    places, addresses = memory.allocate(sizes)
    owners = [block.owner for block in blocks]
    on_host: list[int] = []
    on_devices: list[int] = []
    pinned: dict[int, _native.Slab] = {}
    for number, (block, item) in enumerate(zip(blocks, item_bytes, strict=True)):
        slab, offset = places[number]
        if slab is None:
            continue
        address = int(addresses[number])
        if block.device >= 0:
            on_devices += (block.device, address, block.address, sizes[number])
            pinned[slab.address] = slab
        elif write_plan.is_contiguous(block, item):
            on_host += (address, block.address, sizes[number])
        else:
            copy: np.ndarray[Any, Any] = np.ndarray(block.shape, f"V{item}", slab, offset)
            np.copyto(copy, _view(block, item))
        _repoint(block, address, item, slab)
    if on_devices:
        _native.copy_from_devices(np.asarray(on_devices, np.int64), list(pinned.values()), owners)
    if on_host:
        _native.copy_batch(np.asarray(on_host, np.int64), owners)


def _repoint(block: Block, address: int, item_bytes: int, slab: Any) -> None:
    strides, step = [], item_bytes
    for extent in reversed(block.shape):
        strides.append(step)
        step *= extent
    block.address = address
    block.strides = tuple(reversed(strides))
    block.device = -1
    block.owner = slab


class _Memory:
    """Foreign memory as NumPy sees it."""

    def __init__(self, block: Block, item_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": block.shape,
            "strides": block.strides,
            "typestr": f"|V{item_bytes}",
            "data": (block.address, True),
        }


def _view(block: Block, item_bytes: int) -> np.ndarray[Any, Any]:
    return np.asarray(_Memory(block, item_bytes))
