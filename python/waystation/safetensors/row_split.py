"""Arrays that the processes of a JAX program read by rows, and then divide among their devices otherwise.

A process that needs short parts of all rows of a tensor would read all of it, as would every other. Where
processes load together, each reads as many whole rows instead, and the devices exchange the parts: so every
byte is read once. Invariants: nothing is exchanged before all processes have read what they are to read; an
array is there in both forms only while it is exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from waystation.frameworks import dtypes
from waystation.frameworks.base import Codec, Target
from waystation.safetensors.open_files import OpenFiles
from waystation.transfers import fit
from waystation.transfers.buffers import Incoming

_LEAST_BYTES = 1 << 20  # what is smaller is read sooner than exchanged


def prepare(
    opened: OpenFiles, codec: Codec, arrays: Sequence[Incoming], verify: bool | None
) -> dict[int, Target]:
    """Has arrays read by rows where that is better. Returns where they go in the end, by their leaves."""
    able = codec.row_exchange
    if able is None:
        return {}
    found: dict[int, Target] = {}
    least_bytes = opened.least_stretch_bytes(verify)
    for array in arrays:
        item_bytes = dtypes.of_stored(array.stored).host.itemsize
        if math.prod(array.stored.shape) * item_bytes < _LEAST_BYTES:
            continue
        reading = able.reading(array.target, item_bytes, least_bytes)
        if reading is not None:
            shape, place = reading
            found[array.leaf] = array.target
            stored = fit.reshaped(array.stored, shape)
            (array.target,) = codec.placed([stored], [array.target.dtype], [place])
    return found


def exchange(codec: Codec, arrays: list[Any], targets: dict[int, Target]) -> None:
    """Divides arrays that were read by rows as they should be, one after the other."""
    able = codec.row_exchange
    for leaf, target in targets.items():
        assert able is not None, "it was asked before"
        arrays[leaf] = able.exchanged(arrays[leaf], target)
