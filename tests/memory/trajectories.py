"""The states that a small trainer passes through, each made from the one before, to the bit.

A state has weights, the moments of an optimizer, random numbers in flight and the place in the data. A trace
of all of them goes along, whose every bit counts, so that one that was restored wrong never meets the
trajectory again, as rounding might have it otherwise.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

State = dict[str, np.ndarray[Any, Any]]
ROWS = 16  # of each process
_COLUMNS = 2048
_FACTORS = np.arange(1, 2 * _COLUMNS, 2, dtype=np.uint64)


def first(seed: int, part: int) -> State:
    """Where the part of a process begins."""
    random = np.random.default_rng([seed, part])
    return {
        "weights": random.standard_normal((ROWS, _COLUMNS)).astype(np.float32),
        "moments": np.zeros((ROWS, _COLUMNS), np.float32),
        "random": random.integers(0, 1 << 63, (ROWS, _COLUMNS), np.uint64),
        "position": np.full((ROWS,), part, np.int64),
        "trace": np.zeros((ROWS,), np.uint64),
    }


def following(state: State) -> State:
    """The state after one more step."""
    random = state["random"] + np.uint64(0x9E3779B97F4A7C15)
    mixed = (random ^ (random >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    noise = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)
    data = np.float32(0.001) * (state["position"] % 97).astype(np.float32)[:, None]
    gradient = np.float32(0.01) * state["weights"] + noise + data
    moments = np.float32(0.9) * state["moments"] + np.float32(0.1) * gradient
    weights = state["weights"] - np.float32(0.01) * moments
    position = state["position"] + 7
    return {
        "weights": weights,
        "moments": moments,
        "random": random,
        "position": position,
        "trace": _trace(state),
    }


def _trace(state: State) -> np.ndarray[Any, Any]:
    """A linear sum with odd factors, modulo 2 to the 64: one bit more or less always changes it."""
    trace = state["trace"] * np.uint64(0xD6E8FEB86659FD93) + state["position"].view(np.uint64)
    for name in ("weights", "moments", "random"):
        bits = state[name].view(f"u{state[name].itemsize}").astype(np.uint64)
        trace = trace * np.uint64(0xD6E8FEB86659FD93) + (bits * _FACTORS).sum(axis=1, dtype=np.uint64)
    return trace


def digest(state: State) -> str:
    """Tells states apart by every bit."""
    found = hashlib.sha256()
    for name in sorted(state):
        array = np.ascontiguousarray(state[name])
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


class Trajectory:
    """The digests of the states of an uninterrupted run, as far as they are asked for."""

    def __init__(self, seed: int, part: int) -> None:
        self._state = first(seed, part)
        self._digests = [digest(self._state)]

    def digest_at(self, step: int) -> str:
        """That of the state after so many steps."""
        while len(self._digests) <= step:
            self._state = following(self._state)
            self._digests.append(digest(self._state))
        return self._digests[step]


@functools.cache
def uninterrupted(seed: int, part: int) -> Trajectory:
    """What a process would do if nothing went wrong."""
    return Trajectory(seed, part)
