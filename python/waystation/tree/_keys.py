"""Keys: how a child is named inside its parent, and key paths: how a leaf is named inside a tree.

Invariants: a key path identifies a node of one tree exactly, whatever characters its keys hold; keys are
immutable and hashable. The dotted label of a path is for people and for the names in data files only: two
paths may share a label, so it never identifies anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, Union

from waystation._errors import Unsupported

SHOWN_KEYS = 64  # a longer path is shown by its ends; its text would otherwise grow with the square of depth
_SHOWN_ENDS = 8
_KEY_DEPTH = 16  # of tuples inside tuples
_KEY_BITS = 12_288  # of an integer; Python refuses to read much longer ones as decimal text


@dataclass(frozen=True, slots=True)
class DictKey:
    """The child of a mapping under `key`."""

    key: Hashable

    def __str__(self) -> str:
        return f"[{self.key!r}]"


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """The child of a list or tuple at `index`."""

    index: int

    def __str__(self) -> str:
        return f"[{self.index}]"


@dataclass(frozen=True, slots=True)
class AttributeKey:
    """The child of a dataclass, named tuple or registered class that the attribute `name` holds."""

    name: str

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True, slots=True)
class ChildKey:
    """The child at `index` of a class that names its children by position alone."""

    index: int

    def __str__(self) -> str:
        return f"<{self.index}>"


Key: TypeAlias = DictKey | SequenceKey | AttributeKey | ChildKey
KeyPath: TypeAlias = tuple[Key, ...]


def format_key_path(path: KeyPath) -> str:
    """The path as Python would write the access: `['params']['w'][0].mu`; of the root, `(root)`."""
    return "".join(shorten([str(key) for key in path], "…")) or "(root)"


def label(path: KeyPath) -> str:
    """The path in dots: `params.w.0.mu`; of the root, the empty string."""
    return ".".join(shorten([key_name(key) for key in path], "…"))


def key_name(key: Key) -> str:
    """One component of a label."""
    if isinstance(key, DictKey):
        return key.key if isinstance(key.key, str) else repr(key.key)
    return key.name if isinstance(key, AttributeKey) else str(key.index)


def shorten(parts: Sequence[str], gap: str) -> Sequence[str]:
    """The parts of a path that are shown: all of them, or both ends around `gap`."""
    if len(parts) <= SHOWN_KEYS:
        return parts
    return [*parts[:_SHOWN_ENDS], gap, *parts[-_SHOWN_ENDS:]]


def check_dict_keys(keys: Sequence[Any]) -> None:
    """Raises Unsupported for a key that could not be stored and come back equal."""
    if set(map(type, keys)) - {str}:
        for key in keys:
            _check_dict_key(key, depth=0)


def _check_dict_key(key: Any, depth: int) -> None:
    if type(key) is tuple:
        if depth == _KEY_DEPTH:
            raise Unsupported(f"a key nests tuples more than {_KEY_DEPTH} deep; use flatter keys")
        for part in key:
            _check_dict_key(part, depth + 1)
    elif key is not None and type(key) not in (str, int, bool, float, bytes, complex):
        kind = f"{type(key).__module__}.{type(key).__qualname__}"
        raise Unsupported(
            f"cannot store the key {key!r} of type {kind}; use keys that are str, int, float, complex, "
            "bool, bytes, None, or tuples of these"
        )
    elif type(key) is int and key.bit_length() > _KEY_BITS:
        raise Unsupported(f"cannot store an integer key of {key.bit_length()} bits; use smaller keys")
    elif key != key:
        raise Unsupported(f"cannot store the key {key!r}: it does not equal itself; use another key")


# ---- annotations -------------------------------------------------------------------------------
# Names for what a tree is made of, for annotations. A tree is any value, so that most of them say little.


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
