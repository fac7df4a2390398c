"""States whose arrays are in other processes: the backend that owns such arrays saves and loads them.

The runtime registers a `RemoteStateBackend`. `save` and `load` give it each state, and each abstract state,
that holds one of its arrays.
"""

from __future__ import annotations

from typing import Any, Protocol

from waystation.transfers.handle import AsyncResponse
from waystation.tree import iterate_leaves


class RemoteStateBackend(Protocol):
    """Saves and loads states whose arrays are in other processes."""

    def has(self, leaf: object) -> bool:
        """Whether a leaf stands for an array of its own."""
        ...

    def save(self, path: str, state: object, *, overwrite: bool, custom_metadata: object) -> None:
        """Saves a state that has such leaves; returns when that is committed."""
        ...

    def save_async(
        self, path: str, state: object, *, overwrite: bool, custom_metadata: object
    ) -> AsyncResponse[None]:
        """Saves a state as it is now; returns when nothing that is done to it later can reach that."""
        ...

    def load(self, path: str, abstract_state: object) -> object:
        """Loads what such leaves stand for."""
        ...

    def load_async(self, path: str, abstract_state: object) -> AsyncResponse[Any]:
        """Loads it in the background; the handle's result is the state, once all of it is there."""
        ...


_backends: list[RemoteStateBackend] = []


def register(backend: RemoteStateBackend) -> None:
    """Has a backend be asked."""
    _backends.append(backend)


def backend_of(state: Any) -> RemoteStateBackend | None:
    """The backend of the first leaf that has one."""
    if not _backends:
        return None
    found = (backend for leaf in iterate_leaves(state) for backend in _backends if backend.has(leaf))
    return next(found, None)
