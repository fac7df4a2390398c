"""Chunks that form no regular grid: a sorted list of boxes under the bounding boxes of groups.

Invariants: boxes are sorted by offset; group g bounds boxes 64 g to 64 g + 63, so that a reader looks at a
few bounding boxes and then only into the groups that meet its own. The words are those of the dims section
of a chunk table (kind 1), after the array's shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from waystation._errors import InvalidInput
from waystation.grid._boxes import Box, BoxArray, box_array, box_at, clip, positions_meeting

GROUP_BOXES = 64


class IrregularBoxes:
    """Sorted boxes that can be searched.

    Attributes:
        boxes: The boxes, sorted by offset.
        groups: The bounding box of each group.
    """

    __slots__ = ("boxes", "groups")

    def __init__(self, boxes: BoxArray, groups: BoxArray) -> None:
        self.boxes = boxes
        self.groups = groups

    @classmethod
    def sort(cls, boxes: Sequence[Box] | BoxArray, ndim: int) -> tuple[IrregularBoxes, NDArray[np.int64]]:
        """Sorts boxes; also returns, for each sorted box, its place among `boxes`."""
        made = box_array(boxes, ndim)
        order = np.lexsort(made[:, 0].T[::-1]) if ndim else np.arange(len(made))
        ordered = made[order]
        return cls(ordered, bound_groups(ordered)), order

    @classmethod
    def from_words(cls, words: NDArray[np.uint64], ndim: int, box_count: int) -> IrregularBoxes:
        """Reads what `to_words` made.

        Raises:
            InvalidInput: There are not as many words as that many boxes have.
        """
        group_count = -(-box_count // GROUP_BOXES)
        if len(words) != (group_count + box_count) * 2 * ndim:
            raise InvalidInput(
                f"{len(words)} words cannot be {box_count} boxes of {ndim} axes and their groups"
            )
        split = group_count * 2 * ndim
        signed = words.astype(np.int64)
        return cls(signed[split:].reshape(box_count, 2, ndim), signed[:split].reshape(group_count, 2, ndim))

    def to_words(self) -> NDArray[np.uint64]:
        """The bounding boxes of the groups, then the boxes."""
        return np.concatenate([self.groups.ravel(), self.boxes.ravel()]).astype("<u8")

    def overlaps(self, box: Box) -> tuple[NDArray[np.int64], BoxArray]:
        """The places of the boxes that share elements with `box`, ascending, and what each shares."""
        hit = positions_meeting(self.groups, box)
        candidates = (hit[:, None] * GROUP_BOXES + np.arange(GROUP_BOXES)).ravel()
        candidates = candidates[candidates < len(self.boxes)]
        positions = candidates[positions_meeting(self.boxes[candidates], box)]
        return positions, clip(self.boxes[positions], box)


def irregular_chunks_meeting(words: NDArray[np.uint64], chunk_count: int, box: Box) -> list[tuple[int, Box]]:
    """The chunks of a table that share elements with `box`, ascending: number and box of each.

    Raises:
        InvalidInput: The words are not those of `chunk_count` boxes.
    """
    irregular = IrregularBoxes.from_words(words, len(box[0]), chunk_count)
    positions, _ = irregular.overlaps(box)
    return [(position, box_at(irregular.boxes, position)) for position in positions.tolist()]


def bound_groups(boxes: BoxArray) -> BoxArray:
    """The bounding box of each run of 64 boxes."""
    if not len(boxes):
        return boxes
    firsts = np.arange(0, len(boxes), GROUP_BOXES)
    offsets = np.minimum.reduceat(boxes[:, 0], firsts)
    ends = np.maximum.reduceat(boxes[:, 0] + boxes[:, 1], firsts)
    return np.stack([offsets, ends - offsets], axis=1)
