"""The mesh that a program has set (`jax.set_mesh`), for loads that go on in the background.

JAX keeps it for each thread, so a load takes it along from the thread that began it. Invariant: JAX is not
imported here.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_taken_along: contextvars.ContextVar[Any] = contextvars.ContextVar("mesh_taken_along", default=None)


def mesh_in_effect() -> Any:
    """The mesh of the calling thread, or the one that its load has taken along; None if none is set."""
    get_mesh = getattr(getattr(sys.modules.get("jax"), "sharding", None), "get_mesh", None)
    mesh = None if get_mesh is None else get_mesh()
    return _taken_along.get() if mesh is None or mesh.empty else mesh


def with_mesh_in_effect(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which in any thread sees the mesh that is in effect now."""
    mesh = mesh_in_effect()
    if mesh is None:
        return function

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _taken_along.set(mesh)
        try:
            return function(*args, **kwargs)
        finally:
            _taken_along.reset(before)

    return call
