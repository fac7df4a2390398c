"""Do boxes cover an array exactly once: no hole, no overlap, nothing outside?

The boundaries of the boxes cut the array into cells. Where there are not many more cells than boxes (every
regular or merely uneven grid) the boxes over each cell are counted at once; else the array is halved along
the boundary that leaves the smaller halves, boxes across it being cut in two, and both halves are checked.
That is near linear for anything a sharding produces, and correct for any boxes.

Invariants: empty boxes cover nothing and are ignored; the defect that is reported is real and non-empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from waystation._distinct import distinct
from waystation.grid._boxes import Box, BoxArray, Shape, box_array, box_at, positions_meeting, whole

_CELLS_PER_BOX = 4
_FREE_CELLS = 1024


@dataclass(frozen=True, slots=True)
class CoverDefect:
    """Why boxes do not cover an array exactly.

    Attributes:
        kind: A `hole` has no box, an `overlap` several, a box may lie `outside`.
        box: Where. Of a hole or overlap not necessarily the whole of it.
        positions: The places, among the boxes given, of those that are there.
    """

    kind: Literal["hole", "overlap", "outside"]
    box: Box
    positions: tuple[int, ...]


@dataclass(slots=True)
class _Region:
    """A part of the array with the boxes that meet it, clipped to it."""

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def find_cover_defect(
    array_shape: Shape, boxes: Sequence[Box] | BoxArray, *, holes_allowed: bool = False
) -> CoverDefect | None:
    """The first defect found, or None if the boxes cover the array exactly once (at most once, if they may
    leave holes)."""
    if len(boxes) == 1 and not isinstance(boxes, np.ndarray) and boxes[0] == whole(array_shape):
        return None
    made = box_array(boxes, len(array_shape))
    extents = np.array(array_shape, dtype=np.int64)
    outside = _outside(made, extents)
    if outside.size:
        first = int(outside[0])
        return CoverDefect("outside", box_at(made, first), (first,))
    if not extents.all():
        return None
    kept = made[(made[:, 1] > 0).all(axis=1)]
    region = _Region(np.zeros_like(extents), extents, kept[:, 0], kept[:, 0] + kept[:, 1])
    defect = _search(region, holes_allowed=holes_allowed)
    if defect is None:
        return None
    positions = positions_meeting(made, defect)
    return CoverDefect("overlap" if positions.size else "hole", defect, tuple(positions.tolist()))


def _outside(boxes: BoxArray, extents: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets, shapes = boxes[:, 0], boxes[:, 1]
    # Written so that no sum can pass 64 bits where the parts are in order.
    wrong = (offsets < 0) | (shapes < 0) | (shapes > extents) | (offsets > extents - shapes)
    return np.flatnonzero(wrong.any(axis=1))


def _search(whole_region: _Region, *, holes_allowed: bool) -> Box | None:
    """A cell that has not exactly one box, or has several."""
    regions = [whole_region]
    while regions:
        region = regions.pop()
        cuts = [
            distinct(np.concatenate([bounds, region.begins[:, axis], region.ends[:, axis]]))
            for axis, bounds in enumerate(zip(region.begin, region.end, strict=True))
        ]
        cells = math.prod(len(cut) - 1 for cut in cuts)
        if cells <= _CELLS_PER_BOX * len(region.begins) + _FREE_CELLS:
            defect = _defect_among_cells(region, cuts, holes_allowed=holes_allowed)
            if defect is not None:
                return defect
        else:
            regions += _halves(region, cuts)
    return None


def _defect_among_cells(region: _Region, cuts: list[NDArray[np.int64]], *, holes_allowed: bool) -> Box | None:
    firsts = np.empty(region.begins.shape, dtype=np.int64)
    lasts = np.empty_like(firsts)
    for axis, cut in enumerate(cuts):
        firsts[:, axis] = np.searchsorted(cut, region.begins[:, axis])
        lasts[:, axis] = np.searchsorted(cut, region.ends[:, axis])
    counts = _count_boxes(firsts, lasts, [len(cut) - 1 for cut in cuts])
    wrong = np.flatnonzero(counts > 1 if holes_allowed else counts != 1)
    if not wrong.size:
        return None
    place = np.unravel_index(wrong[0], counts.shape) if counts.ndim else ()
    offset = tuple(int(cut[at]) for cut, at in zip(cuts, place, strict=True))
    end = tuple(int(cut[at + 1]) for cut, at in zip(cuts, place, strict=True))
    return offset, tuple(high - low for low, high in zip(offset, end, strict=True))


def _count_boxes(
    firsts: NDArray[np.int64], lasts: NDArray[np.int64], cell_counts: list[int]
) -> NDArray[np.int64]:
    """How many boxes lie over each cell, boxes being ranges of cells."""
    if (lasts - firsts == 1).all():
        strides = [math.prod(cell_counts[axis + 1 :]) for axis in range(len(cell_counts))]
        places = firsts @ np.array(strides, dtype=np.int64)
        return np.bincount(places, minlength=math.prod(cell_counts)).reshape(cell_counts)
    # Each box adds one from its first corner on and takes it back beyond its ends; running sums along
    # every axis then give the count. An axis of one cell is spanned by all boxes and needs no corners.
    counts = np.zeros([count + 1 for count in cell_counts], dtype=np.int64)
    axes = [axis for axis, count in enumerate(cell_counts) if count > 1]
    for ends in product((False, True), repeat=len(axes)):
        corner = np.zeros_like(firsts)
        for axis, at_end in zip(axes, ends, strict=True):
            corner[:, axis] = (lasts if at_end else firsts)[:, axis]
        np.add.at(counts, tuple(corner.T), -1 if sum(ends) % 2 else 1)
    for axis in axes:
        np.cumsum(counts, axis=axis, out=counts)
    return counts[tuple(slice(0, count) for count in cell_counts)]


def _halves(region: _Region, cuts: list[NDArray[np.int64]]) -> list[_Region]:
    axis, plane = _best_plane(region, cuts)
    low = region.begins[:, axis] < plane
    high = region.ends[:, axis] > plane
    below = _Region(region.begin, region.end.copy(), region.begins[low], region.ends[low])
    above = _Region(region.begin.copy(), region.end, region.begins[high], region.ends[high])
    below.end[axis] = above.begin[axis] = plane
    np.minimum(below.ends[:, axis], plane, out=below.ends[:, axis])
    np.maximum(above.begins[:, axis], plane, out=above.begins[:, axis])
    return [below, above]


def _best_plane(region: _Region, cuts: list[NDArray[np.int64]]) -> tuple[int, int]:
    """The inner boundary with the fewest boxes on its fuller side plus those that it cuts."""
    best: tuple[int, int, int] | None = None
    box_count = len(region.begins)
    for axis, cut in enumerate(cuts):
        planes = cut[1:-1]
        if not planes.size:
            continue
        begun = np.searchsorted(np.sort(region.begins[:, axis]), planes)  # boxes that begin below
        ended = np.searchsorted(np.sort(region.ends[:, axis]), planes, side="right")
        costs = np.maximum(begun, box_count - ended) + (begun - ended)
        at = int(costs.argmin())
        if best is None or costs[at] < best[0]:
            best = int(costs[at]), axis, int(planes[at])
    assert best is not None, "a region with one cell is never halved"
    return best[1:]
