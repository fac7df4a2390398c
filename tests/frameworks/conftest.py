"""Fixtures of the framework tests. The fake CPU devices come from the conftest of all tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]


@pytest.fixture
def without_private_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX as it is where nothing of its private modules can be had."""
    from waystation.coordination import jax_private

    monkeypatch.setattr(jax_private, "putting", lambda: None)
    monkeypatch.setattr(jax_private, "host_array", lambda: np.asarray)


@pytest.fixture
def pattern() -> Callable[[tuple[int, ...], Any], Array]:
    """Arrays of any plain dtype whose elements differ and are exact in it."""

    def make(shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        name = dtype.name
        if "1" in name and dtype.itemsize == 1 and name in ("int1", "uint1"):
            values = np.zeros(count)
        elif name in ("int2", "uint2", "bool", "float8_e8m0fnu"):
            values = np.arange(count) % 2 + (name == "float8_e8m0fnu")
        else:
            values = np.arange(count) % 4
        return values.reshape(shape).astype(np.float32).astype(dtype)

    return make
