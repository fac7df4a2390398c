"""What the tests of writing Orbax's layouts share: saves by Waystation, and loads by genuine Orbax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tests.orbax.oracle import version0

import waystation


def layout_of(options: Mapping[str, Any], chunk_bytes: int | None = None) -> waystation.Context:
    """Options of `array.saving` for Waystation."""
    context = waystation.Context()
    for name, value in options.items():
        setattr(context.array.saving, name, value)
    context.array.saving.storage_options.chunk_bytes = chunk_bytes
    return context


def save(
    path: Path, state: Any, *, overwrite: bool = False, chunk_bytes: int | None = None, **options: Any
) -> None:
    """Saves by Waystation; options are those of `array.saving`."""
    with layout_of(options, chunk_bytes):
        waystation.save(path, state, overwrite=overwrite)


def load_by_version0(path: Path) -> Any:
    """Loads the state of a checkpoint by the first API of genuine Orbax."""
    return version0.PyTreeCheckpointer().restore(path / "state")


def assert_same_bits(one: Any, other: Any) -> None:
    """Compares arrays of any kind by their dtype, shape and bits."""
    first, second = _on_host(one), _on_host(other)
    assert (first.dtype, first.shape) == (second.dtype, second.shape)
    assert first.tobytes() == second.tobytes()


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)
