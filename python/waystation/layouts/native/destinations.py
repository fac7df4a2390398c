"""Where the boxes of some requests are read to: host memory, or memory of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Region: TypeAlias = tuple[int, int, int]
"""Memory of a device: its CUDA ordinal, the address, the bytes."""


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where boxes go.

    Attributes:
        addresses: Of each box, in the order of the requests; there it is contiguous.
        owner: What keeps the memory alive.
        regions: The memory of devices; what lies in none of them is the host's.
    """

    addresses: NDArray[np.int64]
    owner: Any
    regions: Sequence[Region] = ()
