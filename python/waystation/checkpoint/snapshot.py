"""Snapshots: what makes an asynchronous save safe from later changes of the state.

Leaves that cannot change (JAX arrays on CPU, held by view) are not copied. Those that can (NumPy,
torch, GPU memory that may be donated) are copied into arena memory, up to a limit. What exceeds it is
what the engine copies out before anything else, piece by piece as it writes, so the caller waits for that
part only. Invariants: after `take` every byte that can change is either a copy or in one of the ranges that
it returns; an array of which only a part fits is copied in part.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation import _native, _plans, grid
from waystation._distinct import distinct_objects
from waystation._options import MemoryOptions, Options
from waystation.frameworks.base import ArraySource, Block
from waystation.layouts.native import blocks, memory, write_plan
from waystation.layouts.native.blocks import view_of
from waystation.layouts.native.chunks import Chunk, Chunks, is_contiguous
from waystation.layouts.opened import Slabs
from waystation.layouts.orbax.frame_limits import LEAST_BYTES as LEAST_FRAME_BYTES
from waystation.layouts.orbax.frame_limits import FrameLimits
from waystation.transfers.buffers import Region, aligned

# Cutting an array for less would cost more than it saves.
LEAST_PART_BYTES = 256 << 10


# ---- the bound on host memory that a save takes beyond the state (`memory.write_concurrent_bytes`) ----
#
# What makes up the bound: the blocks that the engine gathers arrays into and writes from, to which memory of
# devices is copied as well; of an asynchronous save, the copies of what could change; and of one that
# compresses, what that takes. Invariants: a bound never makes a save fail, whatever the size of an array;
# what is given to one is taken from the other.

LEAST_BYTES = 1 << 20  # a few blocks of the files, one of which has to be in memory as a whole
_STAGING_MOST_BYTES = 64 << 20  # as much as the engine ever takes


@dataclasses.dataclass(slots=True)
class WriteShares:
    """What may still be taken for what.

    Attributes:
        staging_bytes: For the engine's blocks; None leaves that to the engine.
        snapshot_bytes: For copies of what could change.
        is_bounded: Whether the save keeps to a bound on both together.
    """

    staging_bytes: int | None
    snapshot_bytes: int
    is_bounded: bool

    @classmethod
    def of(cls, options: MemoryOptions, *, with_snapshot: bool) -> WriteShares:
        """Divides the bound; without a snapshot the engine has all of it."""
        wanted, bound = options.snapshot_bytes, options.write_limit_bytes()
        if bound is None:
            return cls(None, _half_of_free_bytes() if wanted is None else wanted, is_bounded=False)
        limit = max(bound, LEAST_BYTES)
        if not with_snapshot:
            return cls(min(limit, _STAGING_MOST_BYTES), 0, is_bounded=True)
        staging = min(limit // 2, _STAGING_MOST_BYTES)
        rest = limit - staging
        return cls(staging, rest if wanted is None else min(rest, wanted), is_bounded=True)


def bound_engine(options: Options, shares: WriteShares) -> Options:
    """The options, with the engine's share among them."""
    if shares.staging_bytes is None:
        return options
    bounded = options.thawed()
    own = bounded.engine.staging_bytes
    bounded.engine.staging_bytes = shares.staging_bytes if own is None else min(own, shares.staging_bytes)
    return bounded.frozen()


def divided_with_frames(options: Options, bound_bytes: int) -> tuple[Options, FrameLimits]:
    """The options of a bounded save with half of its bound, and how it compresses within the other."""
    half = max(bound_bytes // 2, LEAST_FRAME_BYTES)
    halved = options.thawed()
    halved.memory.write_concurrent_bytes = half
    return halved.frozen(), FrameLimits.within(half)


def _half_of_free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@dataclasses.dataclass(slots=True)
class _Copies:
    """What is to be copied: blocks, and the bytes of an element of each."""

    blocks: list[Block] = dataclasses.field(default_factory=list)
    item_bytes: list[int] = dataclasses.field(default_factory=list)

    def add(self, blocks: Sequence[Block], item_bytes: int) -> None:
        self.blocks += blocks
        self.item_bytes += [item_bytes] * len(blocks)

    def sizes(self) -> list[int]:
        return [
            math.prod(block.shape) * item for block, item in zip(self.blocks, self.item_bytes, strict=True)
        ]


def take(
    chunks: Sequence[Chunk],
    sources: Sequence[ArraySource],
    options: MemoryOptions,
    shares: WriteShares,
    cast: Collection[int] = (),
) -> list[tuple[int, int]]:
    """Copies what could change, as far as the limit allows, and repoints the chunks to the copies.

    What is copied is taken off `shares`, so that the states of one save share them.

    Args:
        chunks: What is to be written.
        sources: Their arrays, by number.
        options: What the caller promises.
        shares: The limit.
        cast: Arrays whose chunks are copies already.

    Returns:
        The ranges of plan positions that the engine must have copied out before the caller may change its
        leaves, in order; none if everything that could change is a copy now.
    """
    columns = Chunks.of(chunks)
    kinds, which = distinct_objects(sources)
    may_change = np.array([_can_change(kind, options) for kind in kinds], bool)
    changes = may_change[which[columns.arrays]] & (columns.lengths > 0)
    if cast:
        changes &= [array not in cast for array in columns.arrays.tolist()]
    if _copy_whole(columns, sources, np.flatnonzero(changes), shares):
        return []
    columns.expand()
    order = write_plan.copy_order(chunks)
    ends = np.cumsum([chunks[number].nbytes for number in order]).tolist()
    room = shares.snapshot_bytes
    copies = _Copies()
    waited_for: list[tuple[int, int]] = []
    # What is copied out last would keep the caller waiting longest: that is copied first.
    for number, end in zip(reversed(order), reversed(ends), strict=True):
        chunk = chunks[number]
        if not changes[number]:
            continue
        padding = memory.ALIGN_BYTES * len(chunk.blocks) if shares.is_bounded else 0
        kept, nbytes = _cut_off(chunk, room - padding)
        if kept:
            room -= nbytes + padding
            copies.add(kept, sources[chunk.array].storage_item_bytes)
        if nbytes < chunk.nbytes:
            waited_for.append((end - chunk.nbytes, end - nbytes))
    shares.snapshot_bytes = room
    _copy(copies, is_bounded=shares.is_bounded)
    return _joined(waited_for[::-1])


def _can_change(source: ArraySource, options: MemoryOptions) -> bool:
    # A JAX array is mutable where it may be donated away, in GPU memory: not what a caller promises.
    return source.mutable and (source.framework == "jax" or not options.caller_keeps)


def _copy_whole(
    columns: Chunks, sources: Sequence[ArraySource], places: NDArray[np.int64], shares: WriteShares
) -> bool:
    """Copies chunks, if there is room for all of them."""
    copies = _Copies()
    others = [place for place in places.tolist() if place in columns.others] if columns.others else []
    for place in others:
        chunk = columns.others[place]
        copies.add(chunk.blocks, sources[chunk.array].storage_item_bytes)
    places = places[~np.isin(places, others)]
    lengths = columns.lengths[places]
    nbytes = int(lengths.sum()) + sum(copies.sizes())
    if shares.is_bounded:
        nbytes += memory.ALIGN_BYTES * (len(places) + len(copies.blocks))
    if nbytes > shares.snapshot_bytes:
        return False
    shares.snapshot_bytes -= nbytes
    _copy(copies, is_bounded=shares.is_bounded)
    if not len(places):
        return True
    sizes = lengths.tolist()
    found, addresses = _allocate_of(sizes, is_bounded=shares.is_bounded)(sizes)
    begins = columns.addresses[places]
    plan = _plans.of_columns(_plans.HOST_COPY, destination=addresses, source=begins, nbytes=lengths)
    _native.copy_batch(plan, columns.owners)
    columns.addresses[places] = addresses
    for place, (slab, _) in zip(places.tolist(), found, strict=True):
        columns.owners[place] = slab
    return True


def _allocate_of(
    sizes: Sequence[int], *, is_bounded: bool
) -> Callable[[Sequence[int]], tuple[Slabs, NDArray[np.int64]]]:
    """What gives memory for copies of these sizes."""
    # Memory of one size serves the next save again; within a bound nothing else may be kept.
    return Region(sum(map(aligned, sizes))).allocate if is_bounded and sizes else memory.allocate


def _cut_off(chunk: Chunk, room: int) -> tuple[list[Block], int]:
    """The blocks at the end of a chunk for which there is room, and their bytes: all, the last rows, or none.

    Where rows are cut off within a block, the chunk has two blocks instead of it.
    """
    if chunk.nbytes <= room:
        return chunk.blocks, chunk.nbytes
    axis = next((axis for axis, extent in enumerate(chunk.shape) if extent > 1), None)
    if axis is None or room < LEAST_PART_BYTES:
        return [], 0
    rows = chunk.shape[axis]
    row_bytes = chunk.nbytes // rows
    first = rows - room // row_bytes
    if first == rows:
        return [], 0
    before: list[Block] = []
    after: list[Block] = []
    for block in chunk.blocks:
        head, tail = _parted(block, axis, first)
        before += head
        after += tail
    chunk.blocks = [*before, *after]
    return after, (rows - first) * row_bytes


def _parted(block: Block, axis: int, first: int) -> tuple[list[Block], list[Block]]:
    """A block in what comes before a row of its chunk, and the rest. The axes before are of one element."""
    begin, extent = block.offset[axis], block.shape[axis]
    head = min(max(first - begin, 0), extent)
    if head == 0:
        return [], [block]
    if head == extent:
        return [block], []
    upper, lower = dataclasses.replace(block), dataclasses.replace(block)
    upper.shape = (*block.shape[:axis], head, *block.shape[axis + 1 :])
    lower.shape = (*block.shape[:axis], extent - head, *block.shape[axis + 1 :])
    lower.offset = (*block.offset[:axis], first, *block.offset[axis + 1 :])
    lower.address = block.address + head * block.strides[axis]
    return [upper], [lower]


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        touches = bool(joined) and joined[-1][1] == begin
        joined.append((joined.pop()[0] if touches else begin, end))
    return joined


def _copy(copies: _Copies, *, is_bounded: bool) -> None:
    sizes = copies.sizes()
    places, addresses = _allocate_of(sizes, is_bounded=is_bounded)(sizes)
    owners = [block.owner for block in copies.blocks]
    on_host: list[tuple[int, ...]] = []
    on_devices: list[tuple[int, ...]] = []
    pinned: dict[int, _native.Slab] = {}
    for number, (block, item) in enumerate(zip(copies.blocks, copies.item_bytes, strict=True)):
        slab, offset = places[number]
        if slab is None:
            continue
        address = int(addresses[number])
        if block.device >= 0:
            on_devices += blocks.copies(block, item, address)
            pinned[slab.address] = slab
        elif is_contiguous(block, item):
            on_host.append((address, block.address, sizes[number]))
        else:
            copy: np.ndarray[Any, Any] = np.ndarray(block.shape, f"V{item}", slab, offset)
            np.copyto(copy, view_of(block, len(block.shape), copy.dtype))
        _repoint(block, address, item, slab)
    if on_devices:
        plan = _plans.of_rows(_plans.ARRAY_COPY, on_devices)
        _native.copy_from_devices(plan, list(pinned.values()), owners)
    if on_host:
        _native.copy_batch(_plans.of_rows(_plans.HOST_COPY, on_host), owners)


def _repoint(block: Block, address: int, item_bytes: int, slab: Any) -> None:
    block.address = address
    block.strides = grid.contiguous_strides(block.shape, item_bytes)
    block.device = -1
    block.owner = slab
