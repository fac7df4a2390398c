"""States whose arrays are not in this process: who stands for them here has them saved and loaded.

What has such arrays (the runtime) registers a `Keeper`; `save` and `load` hand over to it the states, and
abstract states, in which it finds one of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

from waystation.transfers.handle import AsyncResponse
from waystation.tree import iterate_leaves


class Keeper(Protocol):
    """What has arrays elsewhere."""

    def has(self, leaf: Any) -> bool:
        """Whether a leaf stands for an array of its own."""
        ...

    def save(self, path: str, state: Any, *, overwrite: bool, custom_metadata: Any) -> None:
        """Saves a state that has such leaves; returns when that is committed."""
        ...

    def save_async(
        self, path: str, state: Any, *, overwrite: bool, custom_metadata: Any
    ) -> AsyncResponse[None]:
        """Saves a state as it is now; returns when nothing that is done to it later can reach that."""
        ...

    def load(self, path: str, abstract_state: Any) -> Any:
        """Loads what such leaves stand for."""
        ...

    def load_async(self, path: str, abstract_state: Any) -> AsyncResponse[Any]:
        """Loads it in the background; the handle's result is the state, once all of it is there."""
        ...


_keepers: list[Keeper] = []


def register(keeper: Keeper) -> None:
    """Has a keeper be asked."""
    _keepers.append(keeper)


def keeper_of(state: Any) -> Keeper | None:
    """The keeper of the first leaf that has one."""
    if not _keepers:
        return None
    found = (keeper for leaf in iterate_leaves(state) for keeper in _keepers if keeper.has(leaf))
    return next(found, None)
