"""Genuine Orbax, as the other side of every comparison: it writes what we read, and says what that is."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as version0
from orbax.checkpoint import v1

import waystation
from waystation.tree import flatten

# What Orbax keeps for tests of its own: checkpoints of earlier releases, some of them damaged on purpose.
FIXTURES = Path(str(importlib.util.find_spec("orbax.checkpoint.experimental.v1").origin)).parent.joinpath(  # type: ignore[union-attr]
    "_src", "testing", "compatibility", "checkpoints"
)

__all__ = ["FIXTURES", "assert_same", "context", "load", "save", "v1", "version0"]


def context(
    *, rich: bool = False, chunk_bytes: int | None = None, **saving: Any
) -> AbstractContextManager[Any]:
    """Options of genuine Orbax: those of `array.saving` by name."""
    options = v1.Context()
    for name, value in saving.items():
        setattr(options.array.saving, name, value)
    if chunk_bytes is not None:
        options.array.saving.storage_options.chunk_byte_size = chunk_bytes
    if rich:
        options.pytree.saving.pytree_metadata_options = type(options.pytree.saving.pytree_metadata_options)(
            support_rich_types=True
        )
    entered: AbstractContextManager[Any] = options
    return entered


def save(path: Path, state: Any, **options: Any) -> None:
    """Saves by genuine Orbax."""
    with context(**options):
        v1.save(path, state)


def load(path: Path, abstract_state: Any = None) -> Any:
    """Loads by genuine Orbax."""
    return v1.load(path, abstract_state)


def assert_same(ours: Any, theirs: Any) -> None:
    """The same containers, the same kinds of leaves, the same shardings, the same bits."""
    our_leaves, our_structure = flatten(_ordered(ours))
    their_leaves, their_structure = flatten(_ordered(theirs))
    assert our_structure == their_structure
    assert our_structure.key_paths() == their_structure.key_paths()
    for path, mine, other in zip(our_structure.key_paths(), our_leaves, their_leaves, strict=True):
        assert_same_leaf(mine, other, path)


def _ordered(tree: Any) -> Any:
    """The same tree with the keys of all dicts in order."""
    return jax.tree.map(lambda leaf: leaf, tree)


def assert_same_leaf(mine: Any, other: Any, path: Any) -> None:
    """The same kind, dtype, shape, sharding and bits."""
    assert isinstance(mine, jax.Array) == isinstance(other, jax.Array), (path, type(mine), type(other))
    if not isinstance(other, jax.Array | np.ndarray):
        assert type(mine) is type(other), path
        assert mine == other, path
        return
    assert (mine.shape, mine.dtype) == (other.shape, other.dtype), path
    if not isinstance(other, jax.Array):
        assert type(mine) is type(other) is np.ndarray, path
        assert mine.tobytes() == other.tobytes(), path
        return
    assert mine.sharding == other.sharding, (path, mine.sharding, other.sharding)
    if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
        mine, other = jax.random.key_data(mine), jax.random.key_data(other)
    assert np.asarray(mine).tobytes() == np.asarray(other).tobytes(), path


def ours(path: Path, abstract_state: Any = None) -> Any:
    """Loads by Waystation."""
    return waystation.load(path, abstract_state)
