"""Where loads put arrays: aligned, apart from each other, in few slabs, and none pins much memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from waystation.layouts.native import memory

MIB = 1 << 20
SIZES = st.one_of(st.integers(0, 5000), st.integers(MIB - 2, MIB + 2), st.integers(0, 6 * MIB))


@given(st.lists(SIZES, max_size=40))
def test_buffers_are_aligned_and_apart(sizes: list[int]) -> None:
    places, addresses = memory.allocate(sizes)
    end = 0
    for number in np.argsort(addresses, kind="stable").tolist():
        slab, offset = places[number]
        if not sizes[number]:
            assert slab is None
            continue
        assert slab is not None
        assert addresses[number] == slab.address + offset
        assert offset + sizes[number] <= slab.nbytes
        assert addresses[number] >= end
        end = addresses[number] + sizes[number]
        assert addresses[number] % (4096 if sizes[number] >= memory.MEDIUM_BYTES else memory.ALIGN_BYTES) == 0


@given(st.lists(SIZES, min_size=1, max_size=40))
def test_a_buffer_pins_no_more_than_its_kind_allows(sizes: list[int]) -> None:
    places, _ = memory.allocate(sizes)
    for nbytes, (slab, _) in zip(sizes, places, strict=True):
        if slab is None:
            continue
        if nbytes >= memory.OWN_SLAB_BYTES:
            assert slab.nbytes == nbytes
        elif nbytes >= memory.MEDIUM_BYTES:
            assert slab.nbytes <= memory.MEDIUM_SLAB_BYTES
        else:
            assert slab.nbytes <= memory.SMALL_SLAB_BYTES


def test_buffers_of_a_megabyte_lie_in_huge_pages() -> None:
    """Sixteen shards of 1.8 MiB each: as many faults of 4 KiB would take longer than to read them."""
    places, _ = memory.allocate([1835008] * 16)
    slabs = {slab.address: slab.nbytes for slab, _ in places if slab is not None}
    assert len(slabs) == 2
    assert all(address % (2 << 20) == 0 for address in slabs)
