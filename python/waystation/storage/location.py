"""Paths of object stores: `pathlib` would take a slash out of `s3://bucket/run`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A path in an object store, such as `s3://bucket/run/1200`; taken wherever a path is.

    It has what does not ask the store: `name`, `parent`, and `/` for what is below it.

    Args:
        text: The location.

    Raises:
        InvalidInput: It is none.
    """

    text: str

    def __post_init__(self) -> None:
        from waystation.storage import object_store

        object.__setattr__(self, "text", object_store.location(self.text))

    def __fspath__(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Location({self.text!r})"

    def __truediv__(self, other: str | os.PathLike[str]) -> Location:
        return Location(f"{self.text}/{os.fspath(other)}")

    @property
    def name(self) -> str:
        """The last part; empty for a whole bucket."""
        _, _, key = self.text.partition("://")[2].partition("/")
        return key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """What it is in; a whole bucket is in itself."""
        return Location(os.path.dirname(self.text)) if self.name else self


AnyPath: TypeAlias = Path | Location


def is_in_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a location in an object store."""
    return "://" in os.fspath(path)


def as_path(path: str | os.PathLike[str]) -> AnyPath:
    """A path as an object: of `pathlib`, or a `Location`."""
    return Location(os.fspath(path)) if is_in_store(path) else Path(path)
