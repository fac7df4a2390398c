"""`scoped_storage_options_creator` is called as Orbax calls it, and does what `storage_options_for` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as oracle

import waystation
from waystation import errors


def state() -> dict[str, Any]:
    return {"small": [jnp.arange(8.0), np.ones(3)], "large": {"w": jnp.ones((16, 16))}, "step": 7}


def calls_of(module: Any, path: Path) -> dict[str, Any]:
    """What a library calls the function with, of arrays."""
    seen: dict[str, Any] = {}

    def creator(key: Any, value: Any) -> None:
        if hasattr(value, "shape"):
            seen[jax.tree_util.keystr(key)] = value

    context = module.Context()
    context.array.saving.scoped_storage_options_creator = creator
    with context:
        module.save(path, state())
    return seen


def test_it_is_called_as_orbax_calls_it(tmp_path: Path) -> None:
    ours, theirs = (calls_of(waystation, tmp_path / "ours"), calls_of(oracle, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys() == {"['small'][0]", "['small'][1]", "['large']['w']"}
    for name, value in ours.items():
        assert type(value) is type(theirs[name])
        assert np.array_equal(value, theirs[name])


@pytest.mark.parametrize("in_background", [False, True])
def test_it_says_how_single_leaves_are_stored(tmp_path: Path, in_background: bool) -> None:
    context = waystation.Context()
    context.array.saving.storage_options.dtype = jnp.float32
    context.array.saving.scoped_storage_options_creator = lambda key, value: (
        waystation.StorageOptions(dtype=jnp.float16, chunk_byte_size=64) if value.ndim == 2 else None
    )
    with context:
        if in_background:
            waystation.save_async(tmp_path / "checkpoint", state()).result()
        else:
            waystation.save(tmp_path / "checkpoint", state())
    found = waystation.metadata(tmp_path / "checkpoint").metadata
    assert found["large"]["w"].dtype == jnp.float16
    assert found["large"]["w"].storage_metadata.chunk_shape == (4, 8)
    assert [leaf.dtype for leaf in found["small"]] == [jnp.float32, np.float32]


def test_one_of_the_two_functions_is_enough(tmp_path: Path) -> None:
    context = waystation.Context()
    context.array.saving.scoped_storage_options_creator = lambda key, value: None
    context.array.saving.storage_options_for = lambda path, array: None
    with context, pytest.raises(errors.InvalidInput, match="not both"):
        waystation.save(tmp_path / "checkpoint", state())
    context = waystation.Context()
    context.array.saving.scoped_storage_options_creator = lambda key, value: 3  # type: ignore[assignment]
    with context, pytest.raises(errors.InvalidInput, match=r"\['small'\]\[0\]"):
        waystation.save(tmp_path / "checkpoint", state())
    assert list(tmp_path.iterdir()) == []
