"""DLPack capsules over slabs: torch takes them without a copy, and they keep the memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from waystation import _native
from waystation.errors import InvalidInput

FLOAT32 = (2, 32)
BFLOAT16 = (4, 16)


def _live_bytes() -> int:
    gc.collect()
    return _native.arena_statistics()["live_bytes"]


def test_a_tensor_is_the_memory_and_keeps_it() -> None:
    before = _live_bytes()
    slab = _native.allocate(8192)
    memory = np.frombuffer(slab, np.float32)
    memory[:] = np.arange(2048)
    capsules = _native.dlpack_capsules(
        [slab, slab, None, slab], [0, 256, 0, 4096], [(2, 3), (), (0, 5), (4,)], [FLOAT32] * 3 + [BFLOAT16]
    )
    first, scalar, empty, half = map(from_dlpack, capsules)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (scalar.shape, scalar.item()) == ((), 64)
    assert (empty.shape, empty.dtype) == ((0, 5), torch.float32)
    assert (half.dtype, half.untyped_storage().nbytes()) == (torch.bfloat16, 8)
    first[1, 2] = -1
    assert memory[5] == -1
    assert first.untyped_storage().nbytes() == 24  # of its own: `torch.save` writes no more than that
    del memory, slab, capsules, scalar, half
    assert _live_bytes() - before >= 8192
    assert first.tolist() == [[0, 1, 2], [3, 4, -1]]
    del first
    assert _live_bytes() == before


def test_what_nobody_takes_is_let_go_of() -> None:
    before = _live_bytes()
    capsules = _native.dlpack_capsules([_native.allocate(4096)], [0], [(8,)], [FLOAT32])
    assert _live_bytes() > before
    del capsules
    assert _live_bytes() == before


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        (4096 - 4, (2,)),
        (4097, (0,)),
        (0, (1025,)),
        (2**63, (1,)),
        (0, (-1,)),
        (0, (2**62, 2**62)),
        (0, (2**61, 2)),
    ],
)
def test_what_is_not_all_in_the_slab_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    before = _live_bytes()
    slab: Any = _native.allocate(4096)
    with pytest.raises(InvalidInput):
        _native.dlpack_capsules([slab, slab], [0, offset], [(1,), shape], [FLOAT32, FLOAT32])
    del slab
    assert _live_bytes() == before


def test_lists_of_different_lengths_and_memory_without_a_slab_are_refused() -> None:
    with pytest.raises(InvalidInput, match="differ in number"):
        _native.dlpack_capsules([None], [0, 0], [(0,)], [FLOAT32])
    with pytest.raises(InvalidInput, match="beyond"):
        _native.dlpack_capsules([None], [0], [(1,)], [FLOAT32])
