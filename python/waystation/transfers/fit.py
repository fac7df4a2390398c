"""Arrays that are wanted with other extents than they were saved with: padded with zeros, or truncated.

Both shapes begin at the same corner, so a box of the wanted array is at the same place in the stored one:
what of it lies within is read, the rest is zeros. Invariants: the number of axes is the same; codecs never
learn of it, since they are shown the stored array as if it had the wanted shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from waystation.frameworks.base import StoredArray
from waystation.grid import Box, intersect, whole


def reshaped(stored: StoredArray, shape: tuple[int, ...]) -> StoredArray:
    """What the checkpoint would say of the array if it had been saved with other extents."""
    trailing = stored.storage_shape[len(stored.shape) :]
    return dataclasses.replace(stored, shape=shape, storage_shape=shape + trailing)


def stored_part(stored: StoredArray, box: Box) -> Box | None:
    """What of a wanted box the stored array has; None if that is nothing."""
    return intersect(box, whole(stored.shape))


def fill_with_zeros(buffer: np.ndarray[Any, Any]) -> None:
    """Zeros as `numpy.zeros` has them for every dtype, also those that no number can be assigned to."""
    buffer.reshape(-1).view(np.uint8)[...] = 0
