"""Checkpoints of arrays of a client: hosts move the bytes, this program gives a path and names.

A save is in the order of calls: it has what arrays were when it was called, and returns when it is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from waystation._errors import Unsupported
from waystation.runtime.ir import Value
from waystation.runtime.tracing import Array

if TYPE_CHECKING:
    from waystation.runtime.client.backend import Backend


class Saves(Protocol):
    """What a backend has whose hosts save arrays; see `ClusterBackend`."""

    def save(
        self,
        path: str,
        arrays: Mapping[str, int],
        *,
        overwrite: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Saves arrays; returns when that is committed."""
        ...

    def load(self, path: str, arrays: Mapping[str, tuple[int, Value]]) -> None:
        """Loads arrays; returns at once."""
        ...


def saves_of(backend: Backend) -> Saves:
    """The same backend, if its hosts save arrays.

    Raises:
        Unsupported: They do not.
    """
    if not hasattr(backend, "save"):
        raise Unsupported(f"{backend!r} has no hosts that save arrays; read them, and use waystation.save")
    return cast(Saves, backend)


def value_like(array: Array, number: int) -> Value:
    """How an array is to lie that is like another one, which need not be there any more."""
    kind = array.kind
    return Value(number, kind.shape, kind.dtype, array.slice.number, kind.sharding)
