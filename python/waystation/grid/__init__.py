"""Index arithmetic of shards and chunks: pure integers, no framework.

A box is `(offset, shape)`. Regular chunks are a `ChunkGrid`, others `IrregularBoxes`. Runs say where chunks
are that follow a pattern.
"""

from waystation.grid._boxes import (
    Box,
    BoxArray,
    Shape,
    box_array,
    box_at,
    box_of_slices,
    contains,
    contiguous_span,
    contiguous_strides,
    intersect,
    positions_meeting,
    relative_to,
    slices_of_box,
    subtract,
    volume,
    whole,
)
from waystation.grid._chunk_grid import ChunkGrid, find_grid
from waystation.grid._chunk_shape import choose_chunk_shape
from waystation.grid._cover import CoverDefect, find_cover_defect
from waystation.grid._irregular import GROUP_BOXES, IrregularBoxes, bound_groups, irregular_chunks_meeting
from waystation.grid._runs import GROUP_RUNS, RUN_WORDS, find_runs, places_in_runs, words_of_runs
from waystation.grid._spread import Sharing, Spread

__all__ = [
    "GROUP_BOXES",
    "GROUP_RUNS",
    "RUN_WORDS",
    "Box",
    "BoxArray",
    "ChunkGrid",
    "CoverDefect",
    "IrregularBoxes",
    "Shape",
    "Sharing",
    "Spread",
    "bound_groups",
    "box_array",
    "box_at",
    "box_of_slices",
    "choose_chunk_shape",
    "contains",
    "contiguous_span",
    "contiguous_strides",
    "find_cover_defect",
    "find_grid",
    "find_runs",
    "intersect",
    "irregular_chunks_meeting",
    "places_in_runs",
    "positions_meeting",
    "relative_to",
    "slices_of_box",
    "subtract",
    "volume",
    "whole",
    "words_of_runs",
]
