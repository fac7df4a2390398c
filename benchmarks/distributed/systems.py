"""The libraries as a program of several processes uses them: save a sharded state, load it by a template.

Subchunks are asked of each with the same sizes. Waystation is told the axis as well; Orbax is not, because it
cuts an axis that it is told to single elements, whatever the size: a load of the guide's blocks then takes
many times as long as without subchunks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIBRARIES = ("waystation", "orbax", "orbax-plain")
"""As they are named; of Orbax as it comes (OCDBT, compressed) and with neither."""

Chunking = tuple[int, int | None]
"""Bytes of a chunk, and the axis along which to cut for it; None leaves that to the library."""


@dataclass(slots=True)
class Library:
    """A library, set up.

    Attributes:
        save: Saves a state to a path.
        load: Loads from a path by a template.
        statistics: What the library says of each load, in order; of a silent one nothing.
    """

    save: Callable[[Path | str, Any], None]
    load: Callable[[Path | str, Any], Any]
    statistics: list[Any] = field(default_factory=list)


def prepare(name: str, chunking: dict[str, Chunking], settings: dict[str, Any]) -> Library:
    """Imports a library and sets it up.

    Args:
        name: One of `LIBRARIES`.
        chunking: How the arrays are to be cut, by dotted name; empty cuts none.
        settings: Further options of Waystation, by their dotted names.
    """
    if name == "waystation":
        return _waystation(chunking, settings)
    if settings:
        raise ValueError(f"{name} has no settings here")
    return _orbax(chunking, plain=name == "orbax-plain")


def _waystation(chunking: dict[str, Chunking], settings: dict[str, Any]) -> Library:
    import waystation

    context = waystation.Context()
    configure(context, settings)
    statistics: list[Any] = []
    context.array.loading.on_statistics = statistics.append
    if chunking:
        context.array.saving.storage_options_for = lambda label, _: _storage_options(chunking.get(label))
    return Library(_within(context, waystation.save), _within(context, waystation.load), statistics)


def configure(context: Any, settings: dict[str, Any]) -> None:
    """Sets options of a context by their dotted names."""
    for name, value in settings.items():
        *groups, last = name.split(".")
        group = context
        for step in groups:
            group = getattr(group, step)
        setattr(group, last, value)


def _storage_options(chunking: Chunking | None) -> Any:
    from waystation import StorageOptions

    if chunking is None:
        return None
    chunk_bytes, axis = chunking
    return StorageOptions(chunk_bytes=chunk_bytes, chunk_axes=None if axis is None else (axis,))


def _orbax(chunking: dict[str, Chunking], *, plain: bool) -> Library:
    import jax
    from orbax.checkpoint import v1

    context: Any = v1.Context()
    saving = context.array.saving
    if plain:
        saving.use_ocdbt = False
        saving.use_compression = False

    def storage_options(key_path: Any, value: Any) -> Any:
        del value
        chosen = chunking.get(jax.tree_util.keystr(key_path, simple=True, separator="."))
        if chosen is None:
            return None
        return type(saving.storage_options)(chunk_byte_size=chosen[0])

    if chunking:
        saving.scoped_storage_options_creator = storage_options
    return Library(_within(context, v1.save), _within(context, v1.load))


def _within(
    context: AbstractContextManager[Any], function: Callable[..., Any]
) -> Callable[[Path | str, Any], Any]:
    def call(path: Path | str, state: Any) -> Any:
        with context:
            return function(path, state)

    return call
