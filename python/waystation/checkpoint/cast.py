"""Casting on the way to storage: what an array is stored as, and its chunks in that dtype.

Only what this process writes is cast, so a cast costs each process memory for its own share in the new
dtype. Chunks that have been cast are this save's own: nothing the caller does changes them.

Invariants: the dtype of an array is decided from its options and its own dtype alone, so every process
decides the same; casts round, and lose more only where the options allow it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from waystation import _native, grid
from waystation._errors import WaystationError
from waystation._options import ArraySavingOptions
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import ArraySource, Block, CastRule
from waystation.layouts.native import memory
from waystation.layouts.native.blocks import copied_to_host, view_of
from waystation.layouts.native.chunks import Chunk, options_by_name


def rule_of(saving: ArraySavingOptions) -> CastRule:
    """The rule of what is saved."""
    return CastRule(saving.allow_lossy_casts, "array.saving.allow_lossy_casts")


def wanted_dtypes(
    sources: Sequence[ArraySource], labels: Sequence[str], saving: ArraySavingOptions
) -> dict[int, str]:
    """The arrays that are to be cast, by number, and to what.

    A dtype that is asked of every array applies to those of its own category (floats stay floats, integers
    integers); one that is asked of an array by name has to be possible.

    Raises:
        InvalidInput: An array cannot be cast to what was asked of it.
        LossyCast: Such a cast loses values.
        Corrupt, Unsupported: There is no such dtype.
    """
    if saving.storage_options_for is None and saving.storage_options.dtype is None:
        return {}
    found = {}
    rule = rule_of(saving)
    for number, (source, label) in enumerate(zip(sources, labels, strict=True)):
        try:
            by_name = options_by_name(saving, label, source).dtype
            dtype = saving.storage_options.dtype if by_name is None else by_name
            if dtype is None or dtype == source.dtype:
                continue
            if by_name is None and not _same_category(source.dtype, dtype):
                continue
            casts.check(source.dtype, dtype, rule)
        except WaystationError as error:
            raise error.where(array=label)
        found[number] = dtype
    return found


def _same_category(present: str, wanted: str) -> bool:
    if dtypes.is_key(present):
        return False
    return dtypes.of_name(present).category == dtypes.of_name(wanted).category


def apply(
    chunks: Sequence[Chunk],
    sources: Sequence[ArraySource],
    labels: Sequence[str],
    wanted: dict[int, str],
    rule: CastRule,
) -> None:
    """Casts chunks, and makes the descriptions of their arrays say so.

    Raises:
        LossyCast: The dtype that was asked for does not hold a value.
    """
    own = [chunk for chunk in chunks if chunk.array in wanted]
    targets = {number: dtypes.of_name(name) for number, name in wanted.items()}
    sizes = []
    for chunk in own:
        target, rank = targets[chunk.array], len(sources[chunk.array].shape)
        sizes.append(math.prod(chunk.shape[:rank]) * target.host.itemsize)
    places, addresses = memory.allocate(sizes)
    for chunk, (slab, offset), address in zip(own, places, addresses.tolist(), strict=True):
        source, target = sources[chunk.array], targets[chunk.array]
        rank = len(source.shape)
        if slab is not None:
            place = np.ndarray(chunk.shape[:rank], target.host, slab, offset)
            try:
                _cast_chunk(chunk, source, rank, place, rule)
            except WaystationError as error:
                raise error.where(array=labels[chunk.array])
        _replace(chunk, target, rank, slab, address)
    for number, target in targets.items():
        source = sources[number]
        source.dtype, source.storage_dtype = target.name, target.storage
        source.storage_shape = target.storage_shape(source.shape)
        source.storage_item_bytes = target.storage_item_bytes


def _cast_chunk(
    chunk: Chunk, source: ArraySource, rank: int, place: np.ndarray[Any, Any], rule: CastRule
) -> None:
    host = dtypes.of_stored(source).host
    for part in chunk.blocks:
        block = part if part.device < 0 else copied_to_host(part, source.storage_item_bytes)
        values = view_of(block, rank, host)
        box = tuple(
            slice(begin, begin + extent)
            for begin, extent in zip(block.offset[:rank], block.shape[:rank], strict=True)
        )
        casts.copy(place[box] if box else place, values, rule)


def _replace(
    chunk: Chunk, target: dtypes.LogicalDtype, rank: int, slab: _native.Slab | None, address: int
) -> None:
    chunk.shape = target.storage_shape(chunk.shape[:rank])
    chunk.nbytes = math.prod(chunk.shape) * target.storage_item_bytes
    if chunk.offset is not None:
        chunk.offset = chunk.offset[:rank] + (0,) * len(target.trailing)
    if slab is None:
        chunk.blocks = []
        return
    strides = grid.contiguous_strides(chunk.shape, target.storage_item_bytes)
    chunk.blocks = [Block((0,) * len(chunk.shape), chunk.shape, strides, address, slab)]
