"""Functions of Python that hosts call; in a module that hosts can import."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from waystation.errors import InvalidInput


def tell(*operands: list[tuple[tuple[int, ...], np.ndarray]]) -> list[list[np.ndarray]]:
    """Adds to each shard where it begins; on a host."""
    (shards,) = operands
    return [[block + offset[0] for offset, block in shards]]


REST_S = 14.0


def rest(*operands: list[tuple[tuple[int, ...], np.ndarray]]) -> list[list[np.ndarray]]:
    """Gives what it is given, after a while."""
    time.sleep(REST_S)
    (shards,) = operands
    return [[np.array(block) for _, block in shards]]


def fail(*operands: Any) -> list[list[np.ndarray]]:
    raise InvalidInput("this host will not")
