"""Cases of what checkpointables do: functions of a library and a path, for ours and for genuine Orbax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import waystation

Case = Callable[[Any, Path], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Adds a case."""
    CASES[function.__name__] = function
    return function


class InOrbaxLayout:
    """Ours, but for its contexts: saves in their blocks write one of Orbax's layouts.

    Args:
        use_ocdbt: Which of them.
    """

    def __init__(self, *, use_ocdbt: bool) -> None:
        self._use_ocdbt = use_ocdbt

    def __getattr__(self, name: str) -> Any:
        return getattr(waystation, name)

    def Context(self) -> waystation.Context:  # noqa: N802 (it stands for the class)
        """A context."""
        context = waystation.Context()
        context.array.saving.use_ocdbt = self._use_ocdbt
        return context


def careful(context: Any) -> Any:
    """Has Orbax make directories at once: what it has begun when a save fails would never be awaited."""
    if not isinstance(context, waystation.Context):
        context.asynchronous.create_directories_asynchronously = False
    return context


def registry_of(ocp: Any, *handlers: Any, **bound: Any) -> Any:
    """A context with a registry of its own."""
    registry = ocp.handlers.local_registry()
    for handler in handlers:
        registry.add(handler)
    for name, handler in bound.items():
        registry.add(handler, checkpointable_name=name)
    context = careful(ocp.Context())
    context.checkpointables.registry = registry
    return context


def state() -> dict[str, Any]:
    return {"weights": jnp.arange(6.0).reshape(2, 3), "layers": {"bias": np.ones(3), "step": 7}}


def plain(tree: Any) -> Any:
    """What can be compared."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)
