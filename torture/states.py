"""States whose every value is a function of the step, so that any mixture of two of them shows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
State = dict[str, Array]

# One array that covers several blocks of any layout, some whose sizes have no alignment, and one that names
# the step.
_SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "large": ((700, 1001), "uint8"),
    "odd": ((1001,), "float32"),
    "square": ((64, 64), "float64"),
    "narrow": ((13, 3), "float16"),
    "whole": ((257,), "int64"),
}
LARGEST_STEP = 9


@functools.cache
def state_of(step: int) -> State:
    """The state of a step, which nobody changes."""
    random = np.random.Generator(np.random.Philox(key=step))
    state = {name: _values(random, shape, dtype) for name, (shape, dtype) in _SHAPES.items()}
    state["step"] = np.full((1,), step, np.int64)
    return state


def template() -> State:
    """Zeros of the same shapes and dtypes, for systems that load into what they are given."""
    return {name: np.zeros_like(values) for name, values in state_of(0).items()}


def step_of(loaded: Mapping[str, Any]) -> int:
    """The step of a loaded state, of which every bit is looked at.

    Raises:
        MixedStateError: It is the state of no step.
    """
    step = int(np.asarray(loaded["step"]).ravel()[0]) if "step" in loaded else -1
    if not 0 <= step <= LARGEST_STEP:
        raise MixedStateError(f"the loaded state says that it is of step {step}")
    expected = state_of(step)
    if set(loaded) != set(expected):
        raise MixedStateError(f"the state of step {step} was loaded with the arrays {sorted(loaded)}")
    for name, values in expected.items():
        _require_same(name, step, np.asarray(loaded[name]), values)
    return step


class MixedStateError(Exception):
    """A load gave values that no step has."""


def _require_same(name: str, step: int, found: Array, expected: Array) -> None:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise MixedStateError(f"'{name}' of step {step} is {found.dtype}{found.shape}")
    left = np.frombuffer(found.tobytes(), np.uint8)
    differing = np.flatnonzero(left != np.frombuffer(expected.tobytes(), np.uint8))
    if differing.size:
        first, last = int(differing[0]), int(differing[-1])
        raise MixedStateError(
            f"{differing.size} bytes of '{name}' differ from step {step}, {first} to {last}"
        )


def _values(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    if dtype == "uint8":
        return random.integers(0, 256, shape, np.uint8)
    if dtype == "int64":
        return random.integers(-(1 << 62), 1 << 62, shape, np.int64)
    return random.standard_normal(shape).astype(dtype)
