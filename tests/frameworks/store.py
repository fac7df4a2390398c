"""A store in memory that stands for the engine in the tests of frameworks.

It reads the very addresses and strides that a source names, and hands out buffers as the loader does, so
what is proved here about bytes holds for the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from waystation.frameworks import casts, dtypes, registry
from waystation.frameworks.base import ArraySource, Block, CastRule, StoredArray, Target

Array = np.ndarray[Any, Any]


class _Foreign:
    """The memory of a block as NumPy sees it."""

    def __init__(self, block: Block, item_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": block.shape,
            "strides": block.strides,
            "typestr": f"|V{item_bytes}",
            "data": (block.address, True),
        }


@dataclass
class Saved:
    """One array as a checkpoint would hold it: its description and its bytes in storage terms."""

    stored: StoredArray
    data: Array

    def boxes(self, target: Target) -> list[Array]:
        """The filled buffers that the loader hands to `assemble`."""
        return [self._box(offset, shape, target.dtype) for offset, shape in target.boxes]

    def _box(self, offset: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> Array:
        cut = tuple(slice(start, start + extent) for start, extent in zip(offset, shape, strict=True))
        part = np.ascontiguousarray(self.data[cut] if cut else self.data)
        host = dtypes.numpy_dtype(self.stored.dtype)
        if host is None:  # PRNG keys
            host, shape = dtypes.storage_numpy_dtype(self.stored.storage_dtype), part.shape
        present = np.ndarray(shape, host, part.tobytes())
        wanted = host if dtype == self.stored.dtype else dtypes.numpy_dtype(dtype)
        buffer = aligned(shape, wanted)
        casts.copy(buffer, present, CastRule(may_lose=False, option="the option"))
        return buffer


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array at a 256-byte boundary, as the arena gives them."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return np.ndarray(shape, dtype, raw, start)


def keep(source: ArraySource) -> Saved:
    """Copies what a source names, checking that its blocks partition the array."""
    data = np.zeros(source.storage_shape, f"V{source.storage_item_bytes}")
    covered = np.zeros(source.storage_shape, np.int8)
    for block in source.blocks:
        cut = tuple(slice(start, start + size) for start, size in zip(block.offset, block.shape, strict=True))
        data[cut] = memory_of(block, source.storage_item_bytes)
        covered[cut] += 1
    assert (covered == 1).all()
    return Saved(described(source), data)


def memory_of(block: Block, item_bytes: int) -> Array:
    """What a block names, as raw elements of storage."""
    return np.asarray(_Foreign(block, item_bytes))


def described(source: ArraySource) -> StoredArray:
    """What a checkpoint would say of an array, after a way through JSON."""
    description = None if source.sharding is None else json.loads(json.dumps(source.sharding))
    return StoredArray(
        source.shape,
        source.dtype,
        source.framework,
        source.storage_dtype,
        source.storage_shape,
        description,
        json.loads(json.dumps(source.extra)),
    )


def save(leaf: Any) -> Saved:
    """Saves one leaf by the codec that it belongs to."""
    codec = registry.codec_for(leaf)
    assert codec is not None
    (source,) = codec.sources([leaf])
    return keep(source)


def load(saved: Saved | Sequence[Saved], abstract: Any = None) -> Any:
    """Loads one array (or several as a batch), as saved or by an abstract leaf."""
    batch = [saved] if isinstance(saved, Saved) else list(saved)
    stored = [one.stored for one in batch]
    if abstract is None:
        codec = registry.available_codec(stored[0].framework)
        targets = codec.default_targets(stored)
    else:
        found = registry.codec_for(abstract)
        assert found is not None
        codec = found
        targets = codec.targets([abstract] * len(batch), stored)
    made = codec.assemble(targets, [one.boxes(target) for one, target in zip(batch, targets, strict=True)])
    return made[0] if isinstance(saved, Saved) else made


def bits(array: Any) -> bytes:
    """The bytes of a host array, for comparisons that know no NaN."""
    return np.ascontiguousarray(array).tobytes()
