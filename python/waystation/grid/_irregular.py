"""Chunks that form no regular grid: a sorted list of boxes under the bounding boxes of groups.

Invariants: boxes are sorted by offset; group g bounds boxes 64 g to 64 g + 63, so that a reader looks at a
few bounding boxes and then only into the groups that meet its own. The words are those of the dims section
of a chunk table (kind 1), after the array's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from waystation.grid._boxes import Box, BoxArray, box_array, positions_meeting

GROUP_BOXES = 64


class Words(Protocol):
    """Words of a table: an array, or what reads them as they are needed."""

    def __getitem__(self, key: Any, /) -> Any: ...


class IrregularBoxes:
    """Sorted boxes and the bounding boxes of their groups.

    Attributes:
        boxes: The boxes, sorted by offset.
        groups: The bounding box of each group.
    """

    __slots__ = ("boxes", "groups")

    def __init__(self, boxes: BoxArray, groups: BoxArray) -> None:
        self.boxes: BoxArray = boxes
        self.groups: BoxArray = groups

    @classmethod
    def sort(cls, boxes: Sequence[Box] | BoxArray, ndim: int) -> tuple[IrregularBoxes, NDArray[np.int64]]:
        """Sorts boxes; also returns, for each sorted box, its place among `boxes`."""
        made = box_array(boxes, ndim)
        order = np.lexsort(made[:, 0].T[::-1]) if ndim else np.arange(len(made))
        ordered = made[order]
        return cls(ordered, bound_groups(ordered)), order

    def to_words(self) -> NDArray[np.uint64]:
        """The bounding boxes of the groups, then the boxes."""
        return np.concatenate([self.groups.ravel(), self.boxes.ravel()]).astype("<u8")


def irregular_chunks_meeting(
    words: Words, chunk_count: int, box: Box, begin: int = 0
) -> tuple[NDArray[np.int64], BoxArray]:
    """The chunks of a table that share elements with `box`, ascending: their numbers and boxes.

    Args:
        words: Where `to_words` stands; only what is needed of it is looked at.
        chunk_count: The number of boxes.
        box: What is wanted.
        begin: The place of the first of their words.
    """
    ndim = len(box[0])
    group_count = -(-chunk_count // GROUP_BOXES)
    first = begin + group_count * 2 * ndim
    groups = words[begin:first].astype(np.int64).reshape(group_count, 2, ndim)
    hit = positions_meeting(groups, box)
    numbers = (hit[:, None] * GROUP_BOXES + np.arange(GROUP_BOXES)).ravel()
    numbers = numbers[numbers < chunk_count]
    places = first + numbers[:, None] * 2 * ndim + np.arange(2 * ndim)
    boxes = words[places.ravel()].astype(np.int64).reshape(len(numbers), 2, ndim)
    kept = positions_meeting(boxes, box)
    return numbers[kept], boxes[kept]


def bound_groups(boxes: BoxArray) -> BoxArray:
    """The bounding box of each run of 64 boxes."""
    if not len(boxes):
        return boxes
    firsts = np.arange(0, len(boxes), GROUP_BOXES)
    offsets = np.minimum.reduceat(boxes[:, 0], firsts)
    ends = np.maximum.reduceat(boxes[:, 0] + boxes[:, 1], firsts)
    return np.stack([offsets, ends - offsets], axis=1)
