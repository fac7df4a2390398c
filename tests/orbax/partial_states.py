"""What the tests of partial loads share: a state of layers as JAX, NumPy and torch have it, who writes it in
which layout, and what is asked of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tests.orbax import oracle, writing

import waystation
from waystation import PLACEHOLDER

KINDS = ("jax", "numpy", "torch")
LAYERS = 12


def state_of(kind: str, layers: int = LAYERS) -> dict[str, Any]:
    """A state of so many layers."""
    make: Callable[[Any], Any] = {"jax": jnp.asarray, "numpy": np.asarray, "torch": torch.from_numpy}[kind]
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    return {
        "layers": {
            f"{number:02}": {"w": make(values + number), "b": make(np.full(6, number, np.int32))}
            for number in range(layers)
        },
        "opt": [make(values * 2), make(values * 3)],
        "step": 7,
        "name": "run",
    }


def abstract_of(kind: str, layers: int = LAYERS) -> dict[str, Any]:
    """What to ask for in order to get such a state."""
    state = state_of(kind, layers)
    if kind != "jax":
        return state
    return {
        name: jax.tree.map(waystation.arrays.to_shape_dtype_struct, part)
        if name in ("layers", "opt")
        else part
        for name, part in state.items()
    }


def write_genuinely(path: Path, state: Any, **options: Any) -> None:
    oracle.save(path, state, **options)


def write_natively(path: Path, state: Any) -> None:
    waystation.save(path, state)


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    "native": write_natively,
    "files": lambda path, state: writing.save(path, state, use_ocdbt=False, use_compression=False),
    "ocdbt": lambda path, state: writing.save(path, state, use_ocdbt=True),
    "genuine-files": lambda path, state: write_genuinely(path, state, use_ocdbt=False),
    "genuine": write_genuinely,
}


def without(tree: dict[str, Any], *path: str) -> dict[str, Any]:
    """A copy of a tree of dicts that lacks something."""
    first, *rest = path
    if rest:
        return {**tree, first: without(tree[first], *rest)}
    return {key: value for key, value in tree.items() if key != first}


def replaced(tree: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    """A copy of a tree of dicts with something else in one place, which may be new."""
    first, *rest = path
    return {**tree, first: replaced(tree[first], value, *rest) if rest else value}


# What is asked for, made of all that there is, and whether the checkpoint may have more.
ASKED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], bool]] = {
    "everything": (lambda all_of_it: all_of_it, False),
    "everything, with leave for more": (lambda all_of_it: all_of_it, True),
    "a subset": (lambda all_of_it: {"layers": {"03": all_of_it["layers"]["03"]}}, True),
    "leaves here and there": (
        lambda all_of_it: {"layers": {"03": without(all_of_it["layers"]["03"], "b")}, "step": 0},
        True,
    ),
    "a subset, without leave": (lambda all_of_it: without(all_of_it, "opt"), False),
    "a leaf less, without leave": (lambda all_of_it: without(all_of_it, "layers", "03", "b"), False),
    "a placeholder": (lambda all_of_it: replaced(all_of_it, PLACEHOLDER, "layers", "03", "w"), False),
    "a placeholder for nothing": (lambda all_of_it: replaced(all_of_it, PLACEHOLDER, "new"), False),
    "a placeholder for a scalar": (lambda all_of_it: replaced(all_of_it, PLACEHOLDER, "step"), False),
    "a placeholder, and less": (
        lambda all_of_it: without(replaced(all_of_it, PLACEHOLDER, "step"), "name"),
        False,
    ),
    "what is not there": (lambda all_of_it: replaced(all_of_it, all_of_it["opt"][0], "new"), False),
}


def loading(*, partial_load: bool = False, select: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Options of Waystation's loads."""
    context = waystation.Context()
    context.pytree.loading.partial_load = partial_load
    context.pytree.loading.select = select
    return context


def genuine_loading(*, partial_load: bool) -> contextlib.AbstractContextManager[Any]:
    """Those of genuine Orbax."""
    context = oracle.v1.Context()
    context.pytree.loading.partial_load = partial_load
    entered: contextlib.AbstractContextManager[Any] = context
    return entered


def plain(tree: Any) -> Any:
    """A tree with lists of numbers for arrays of any framework, which can be compared."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if tree is PLACEHOLDER or isinstance(tree, str):
        return tree
    array = np.asarray(tree)
    return type(tree) is int, str(array.dtype), array.tolist()
