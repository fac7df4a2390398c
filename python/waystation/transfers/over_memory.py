"""Leaves that are made over host memory while the engine still fills it.

Shape, dtype and place say all that some frameworks want to know of an array, so that thousands of small ones
are made in the time that their bytes take. Who asks for such leaves gets them only once every byte is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waystation import _native
from waystation._collection import paused_collection
from waystation.frameworks.base import Codec
from waystation.layouts.native.read import Request
from waystation.transfers.buffers import Incoming, Reading, by_kind


def can_make(reading: Reading, codec: Codec, batch: Sequence[Incoming]) -> bool:
    """Whether all of a batch, of which nothing has been read yet, can be made so."""
    able = codec.over_memory
    return (
        able is not None
        and len(batch) > 0
        and hasattr(reading.opened, "read_over")
        and reading.mappings is None
        and not any(incoming.buffers for incoming in batch)
        and all(by_kind(lambda own: own.is_plain and able.is_made_over_memory(own.target), batch))
    )


def load(reading: Reading, codec: Codec, batch: Sequence[Incoming]) -> list[Any]:
    """The leaves of such a batch."""
    able = codec.over_memory
    assert able is not None, "it was asked before"

    def over(slabs: Sequence[_native.Slab | None], offsets: Sequence[int]) -> list[Any]:
        return list(able.arrays_over([incoming.target for incoming in batch], slabs, offsets))

    with paused_collection():
        requests = [Request(incoming.array or 0, incoming.target.boxes) for incoming in batch]
    return reading.read_over(requests, over)
