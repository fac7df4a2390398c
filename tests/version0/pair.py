"""Genuine Orbax's version 0 and ours, side by side: the same calls, and what is visible of them."""

from __future__ import annotations

import shutil
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as theirs
from tests.orbax import oracle

import waystation.compat.orbax as ours

BUILT_IN = (FileNotFoundError, KeyError, ValueError, TypeError, NotImplementedError, OSError)

LIBRARIES = {"theirs": theirs, "ours": ours}


def state(step: int) -> dict[str, Any]:
    """A state with leaves of all kinds, which tells its step."""
    return {
        "w": jnp.full((2, 3), float(step)),
        "b": jnp.arange(4, dtype=jnp.bfloat16) + step,
        "host": np.arange(3) + step,
        "step": step,
        "rate": step / 4,
        "pairs": [(jnp.int32(step), {"x": np.float16([1, step])}), None],
        "nothing": {},
    }


@dataclass
class Outcome:
    """What a call has returned, or the error that it has raised."""

    value: Any = None
    error: Exception | None = None


def outcome(call: Callable[[], Any]) -> Outcome:
    """Makes a call."""
    try:
        return Outcome(value=call())
    except Exception as error:
        return Outcome(error=error)


def kinds_of(error: Exception) -> tuple[type[Exception], ...]:
    """The built-in kinds of an error, but for those that say nothing."""
    return tuple(kind for kind in BUILT_IN if isinstance(error, kind))


def visible(value: Any) -> Any:
    """A value as both libraries show it, where they have classes of their own for it."""
    name = type(value).__name__
    if name in ("Composite", "CompositeArgs"):
        return {item: visible(own) for item, own in value.items()}
    if name in ("TreeMetadata", "_TreeMetadataImpl"):
        return {
            "tree": jax.tree.map(_leaf, value.tree, is_leaf=lambda leaf: hasattr(leaf, "directory")),
            "custom": value.custom_metadata,
        }
    if name == "StepMetadata":
        return {
            "handlers": value.item_handlers,
            "items": visible(value.item_metadata),
            "custom": value.custom_metadata,
            "times": [value.init_timestamp_nsecs is None, value.commit_timestamp_nsecs is None],
        }
    if name == "RootMetadata":
        return value.custom_metadata
    return value


def _leaf(leaf: Any) -> Any:
    if not hasattr(leaf, "directory"):
        return leaf
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return type(leaf).__name__, leaf.name, Path(str(leaf.directory)).name, shape, str(dtype)


def assert_same(mine: Any, other: Any, what: object) -> None:
    """The same visible value."""
    mine, other = visible(mine), visible(other)
    assert type(mine) is type(other) or isinstance(mine, type(other)), (what, mine, other)
    if isinstance(other, dict | list | tuple) and jax.tree.leaves(other):
        oracle.assert_same(mine, other)
    else:
        assert mine == other, (what, mine, other)


class Pair:
    """Two managers, one of each library, each over a directory of its own.

    Args:
        root: Where these are.
        options: Makes the options, of the library that is given.
        arguments: More arguments of the managers.
    """

    def __init__(
        self,
        root: Path,
        options: Callable[[types.ModuleType], dict[str, Any]],
        **arguments: Any,
    ) -> None:
        self.roots = {name: root / name for name in LIBRARIES}
        self._options = options
        self._arguments = arguments
        self.managers = {name: self._opened(name, name) for name in LIBRARIES}

    def _opened(self, library: str, directory: str) -> Any:
        module = LIBRARIES[library]
        options = module.CheckpointManagerOptions(**self._options(module))
        return module.CheckpointManager(self.roots[directory], options=options, **self._arguments)

    def same(self, what: str, call: Callable[[Any, Any], Any]) -> Any:
        """Makes a call of both, given the manager and its library; returns what ours has returned."""
        found = {
            name: outcome(lambda name=name: call(self.managers[name], LIBRARIES[name]))  # type: ignore[misc]
            for name in LIBRARIES
        }
        mine, other = found["ours"], found["theirs"]
        assert (mine.error is None) == (other.error is None), (what, mine, other)
        if other.error is not None:
            assert isinstance(mine.error, kinds_of(other.error)), (what, mine, other)
            return None
        assert_same(mine.value, other.value, what)
        return mine.value

    def assert_same_steps(self) -> None:
        """The same steps, seen and on disk."""
        for name in ("all_steps", "latest_step", "best_step"):
            self.same(name, lambda manager, _, name=name: getattr(manager, name)())

    def wait(self) -> None:
        """Waits for both."""
        self.same("wait", lambda manager, _: manager.wait_until_finished())

    def on_disk(self) -> None:
        """The same names of directories of steps, once nothing runs any more. The last good one of a sequence
        stays here, whatever the options say."""
        if not self.managers["ours"].all_steps():
            return
        listed = {
            name: sorted(path.name for path in root.iterdir() if path.name != "metadata")
            if root.exists()
            else []
            for name, root in self.roots.items()
        }
        assert listed["ours"] == listed["theirs"]

    def restart(self) -> None:
        """Both managers end, and others begin over their directories."""
        self.close()
        self.managers = {name: self._opened(name, name) for name in LIBRARIES}

    def exchange(self) -> None:
        """Both managers end, and each library goes on with what the other has saved."""
        self.close()
        first, second = self.roots.values()
        aside = first.with_name("aside")
        for source, target in ((first, aside), (second, first), (aside, second)):
            if source.exists():
                shutil.move(source, target)
        self.managers = {name: self._opened(name, name) for name in LIBRARIES}

    def close(self) -> None:
        """Ends both."""
        for manager in self.managers.values():
            manager.close()
