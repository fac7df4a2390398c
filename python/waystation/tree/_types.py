"""Names for what a tree is made of, for annotations. A tree is any value, so that most of them say little."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar, Union

from waystation.tree._keys import Key, KeyPath

T = TypeVar("T")

# A tree: any nesting of containers, with leaves of any kind.
PyTree: TypeAlias = Any

# A tree with leaves of one kind.
PyTreeOf: TypeAlias = Union[Any, T]  # noqa: UP007  # `|` with Any would not take an argument

PyTreeKey: TypeAlias = Key
PyTreeKeyPath: TypeAlias = KeyPath

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
JsonType: TypeAlias = "list[JsonValue] | dict[str, JsonValue]"

# What can be saved: arrays of JAX, torch and NumPy, numbers, strings and bytes.
Leaf: TypeAlias = Any

# What asks for such a leaf: see the table in the guide to loading.
AbstractLeaf: TypeAlias = Any
