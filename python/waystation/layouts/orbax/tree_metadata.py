"""`_METADATA`: the leaves of a tree, how they are reached and what they are.

Version 0 wrote fewer members; what is absent has Orbax's default for it. The values of strings and arrays are
elsewhere. With rich types, the file says in one more member which containers were tuples and named tuples
(`rich_types.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from waystation._errors import Corrupt
from waystation.layouts.orbax.json_files import dump, parse_object, reading, require, shape, text
from waystation.layouts.orbax.names import parameter
from waystation.layouts.orbax.paths import EMPTIES, EMPTY_NAMED, EMPTY_NONE, Path, Step

JAX_ARRAY, NUMPY_ARRAY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"

_POSITION, _NAME = 1, 2  # the types of keys


@dataclass(frozen=True, slots=True)
class Value:
    """What a leaf or an empty container is.

    Attributes:
        kind: `JAX_ARRAY`, `NUMPY_ARRAY`, `SCALAR`, `STRING`, one of `paths.EMPTIES`, or the name that a
            handler of the program has for its own kind.
        write_shape: Of what one device wrote of a JAX array.
    """

    kind: str
    write_shape: tuple[int, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it is an empty container or None."""
        return self.kind in EMPTIES

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        body: dict[str, Any] = {"value_type": self.kind, "skip_deserialize": self.is_empty}
        return body if self.write_shape is None else {**body, "write_shape": self.write_shape}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Value:
        """What the file says; anything else raises what `json_files.reading` makes Corrupt."""
        written = body.get("write_shape")
        return cls(text(body["value_type"]), None if written is None else shape(written))


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf or an empty container."""

    path: Path
    value: Value

    @property
    def keys(self) -> tuple[str, ...]:
        """The names along the path."""
        return tuple([step.name for step in self.path])

    @property
    def name(self) -> str:
        """Under which the leaf is stored."""
        return parameter(self.keys)


@dataclass(frozen=True, slots=True)
class TreeMetadata:
    """The content of the file.

    Attributes:
        entries: In the order of the file.
        use_ocdbt: Whether arrays are in an OCDBT database; None if nothing is said.
        use_zarr3: Whether arrays are zarr of version 3, else of version 2.
        has_every_chunk: Whether chunks were written that hold nothing but the fill value: then a missing one
            is damage.
        custom_metadata: The caller's own, of version 0.
        rich_tree: What the member for rich types holds, as text; None if it is absent.
    """

    entries: Sequence[Entry]
    use_ocdbt: bool | None
    use_zarr3: bool
    has_every_chunk: bool = True
    custom_metadata: Any = None
    rich_tree: str | None = None

    def encode(self) -> bytes:
        """The bytes of the file."""
        tree = {str(entry.keys): _entry_to_json(entry) for entry in self.entries}
        body: dict[str, Any] = {
            "tree_metadata": tree,
            "use_ocdbt": self.use_ocdbt,
            "use_zarr3": self.use_zarr3,
            "store_array_data_equal_to_fill_value": self.has_every_chunk,
            "custom_metadata": self.custom_metadata,
        }
        return dump(body if self.rich_tree is None else {**body, "value_metadata_tree": self.rich_tree})

    @classmethod
    def decode(cls, data: bytes, path: str) -> TreeMetadata:
        """Reads the bytes of the file.

        Raises:
            Corrupt: They are not such a file.
        """
        body = parse_object(data, path)
        with reading(path):
            rich_tree = body.get("value_metadata_tree")
            return cls(
                [_entry_from_json(entry) for entry in body["tree_metadata"].values()],
                _flag(body.get("use_ocdbt"), None),
                _flag(body.get("use_zarr3"), default=False) is True,
                _flag(body.get("store_array_data_equal_to_fill_value"), default=False) is True,
                body.get("custom_metadata"),
                None if rich_tree is None else text(rich_tree),
            )


def check_distinct(names: Sequence[str], path: str) -> None:
    """Refuses arrays that are stored under one name: only one of them can still be there.

    Raises:
        Corrupt: There are such arrays.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise Corrupt(
                f"'{path}' has two arrays under the name {name!r}, of which only one was kept: keys with "
                "dots were saved beside nested ones",
                path=path,
                array=name,
            )
        seen.add(name)


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    keys = [{"key": step.name, "key_type": _POSITION if step.is_position else _NAME} for step in entry.path]
    return {"key_metadata": keys, "value_metadata": entry.value.to_json()}


def _entry_from_json(body: dict[str, Any]) -> Entry:
    value = Value.from_json(body["value_metadata"])
    if value.kind == EMPTY_NAMED:  # without rich types
        value = Value(EMPTY_NONE)
    return Entry(tuple([_step(key) for key in body["key_metadata"]]), value)


def _step(body: dict[str, Any]) -> Step:
    kind = body["key_type"]
    require(kind in (_POSITION, _NAME), "a key is of an unknown type")
    return Step(str(body["key"]), kind == _POSITION)


def _flag(value: Any, default: bool | None) -> bool | None:
    require(value is None or isinstance(value, bool), "something is neither true nor false")
    return default if value is None else bool(value)
