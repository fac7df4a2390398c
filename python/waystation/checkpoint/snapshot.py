"""Snapshots: what makes an asynchronous save safe from later changes of the state.

Leaves that cannot change (JAX arrays on CPU, held by view) are not copied. Those that can (NumPy,
torch, GPU memory that may be donated) are copied into arena memory, up to a limit. What exceeds it is
what the engine copies out first, so the caller waits for that part only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from waystation import _native
from waystation._options import MemoryOptions
from waystation.frameworks.base import ArraySource, Block
from waystation.layouts.native import memory, write_plan
from waystation.layouts.native.block_views import view_of
from waystation.layouts.native.chunks import Chunk, is_contiguous


def take(
    chunks: Sequence[Chunk],
    sources: Sequence[ArraySource],
    options: MemoryOptions,
    cast: Collection[int] = (),
) -> int:
    """Copies what could change, as far as the limit allows, and repoints the chunks to the copies.

    Args:
        chunks: What is to be written.
        sources: Their arrays, by number.
        options: The limit, and what the caller promises.
        cast: Arrays whose chunks are copies already.

    Returns:
        The plan position up to which the engine must have copied the chunks out before the caller
        may change its leaves; 0 if everything that could change is a copy now.
    """
    order = write_plan.copy_order(chunks)
    limit = _limit_bytes(options)
    chosen: list[Chunk] = []
    drain = -1
    # What is copied out last would keep the caller waiting longest: that is copied first.
    for place in range(len(order) - 1, -1, -1):
        chunk = chunks[order[place]]
        if not chunk.nbytes or chunk.array in cast or not _can_change(sources[chunk.array], options):
            continue
        if chunk.nbytes <= limit:
            limit -= chunk.nbytes
            chosen.append(chunk)
        else:
            drain = max(drain, place)
    _copy(chosen, sources)
    return sum(chunks[number].nbytes for number in order[: drain + 1])


def _can_change(source: ArraySource, options: MemoryOptions) -> bool:
    # A JAX array is mutable where it may be donated away, in GPU memory: not what a caller promises.
    return source.mutable and (source.framework == "jax" or not options.caller_keeps)


def _limit_bytes(options: MemoryOptions) -> int:
    if options.snapshot_bytes is not None:
        return options.snapshot_bytes
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _copy(chosen: Sequence[Chunk], sources: Sequence[ArraySource]) -> None:
    blocks = [block for chunk in chosen for block in chunk.blocks]
    item_bytes = [sources[chunk.array].storage_item_bytes for chunk in chosen for _ in chunk.blocks]
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
        elif is_contiguous(block, item):
            on_host += (address, block.address, sizes[number])
        else:
            copy: np.ndarray[Any, Any] = np.ndarray(block.shape, f"V{item}", slab, offset)
            np.copyto(copy, view_of(block, len(block.shape), copy.dtype))
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
