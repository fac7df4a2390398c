"""Functions of Python that hosts call; in a module that hosts can import."""

from __future__ import annotations

from typing import Any

import numpy as np

from waystation.errors import InvalidInput


def tell(*operands: list[tuple[tuple[int, ...], np.ndarray]]) -> list[list[np.ndarray]]:
    """Adds to each shard where it begins; on a host."""
    (shards,) = operands
    return [[block + offset[0] for offset, block in shards]]


def fail(*operands: Any) -> list[list[np.ndarray]]:
    raise InvalidInput("this host will not")
