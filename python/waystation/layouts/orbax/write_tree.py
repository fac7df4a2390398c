"""What a state becomes in Orbax's layouts: named arrays, strings, and the entries of its tree.

Everything that these layouts cannot hold is refused here, with its key path, before anything is written:
leaves of a type that they have no word for, and leaves that they would store in one place, since they name
a leaf by its keys joined with dots. What they say less of than ours is no refusal, as it is none in Orbax:
without an abstract state tuples come back as lists and named tuples as dicts.

Invariants: arrays stand in the order of their leaves, numbers among them as arrays without axes; a name is
that of a place inside of the checkpointable's directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from waystation._errors import InvalidInput, UnsupportedLeaf
from waystation.frameworks import dtypes, registry
from waystation.frameworks.base import ArraySource
from waystation.layouts.native.blocks import view_of
from waystation.layouts.opened import ArrayLeaf, Leaf
from waystation.layouts.orbax.paths import Place, places_of
from waystation.layouts.orbax.tree_metadata import JAX_ARRAY, NUMPY_ARRAY, SCALAR, STRING
from waystation.tree import Structure, format_key_path

_NAME_LIMIT_BYTES = 255
_OR_NATIVE = "or save it in Waystation's own layout (array.saving.use_ocdbt = None)"

# What TensorStore has elements of, which Orbax reads with.
_KNOWN_TO_ZARR = frozenset(
    {
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(
            "int2",
            "int4",
            "float4_e2m1fn",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "complex64",
            "complex128",
        ),
        *(f"float8_{kind}" for kind in ("e3m4", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz")),
        *(f"float8_{kind}" for kind in ("e5m2", "e5m2fnuz", "e8m0fnu")),
    }
)


@dataclass(slots=True)
class Leaves:
    """The leaves of a state.

    Attributes:
        structure: Of the state.
        places: Its leaves and empty containers.
        kinds: What each leaf is, as the tree's metadata say it.
        arrays: The arrays.
        names: Under which they are stored.
        strings: The strings, by their names.
    """

    structure: Structure
    places: list[Place]
    kinds: list[str] = field(default_factory=list)
    arrays: list[ArraySource] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    strings: dict[str, str] = field(default_factory=dict)


def leaves_of(structure: Structure, leaves: Sequence[Leaf], sources: Sequence[ArraySource]) -> Leaves:
    """The leaves of a state that has been taken apart.

    Args:
        structure: Of the state.
        leaves: Its leaves: scalars, and the numbers of arrays.
        sources: The arrays.

    Raises:
        UnsupportedLeaf: A leaf is of a type that these layouts do not know.
        InvalidInput: Two leaves would be stored in one place, or a key can be no name.
    """
    found = Leaves(structure, places_of(structure))
    scalars = _scalar_sources(leaves, structure)
    for place in found.places:
        if place.leaf is None:
            continue
        leaf, name = leaves[place.leaf], ".".join(place.keys)
        source = sources[leaf.array] if isinstance(leaf, ArrayLeaf) else scalars.get(place.leaf)
        _check_name(name, structure, place.leaf)
        text = _text_of(leaf, source)
        if text is not None:
            _check_text(text, structure, place.leaf)
            found.kinds.append(STRING)
            found.strings[name] = text
            continue
        assert source is not None, "a leaf is a string, a number or an array"
        _check_array(source, structure, place.leaf)
        found.kinds.append(_kind_of(leaf, source))
        found.arrays.append(source)
        found.names.append(name)
    _check_distinct(found)
    return found


def _scalar_sources(leaves: Sequence[Leaf], structure: Structure) -> dict[int, ArraySource]:
    """The numbers among the leaves as arrays without axes, by the number of the leaf."""
    arrays: dict[int, np.ndarray[Any, Any]] = {}
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, bool | int | float):
            array = np.asarray(leaf)
            if array.dtype.kind == "O":
                bits = int(leaf).bit_length()
                message = f"Orbax's layouts have no integers of {bits} bits; make it text"
                raise _unsupported(message, structure, number)
            arrays[number] = array
        elif isinstance(leaf, complex | bytes):
            kind = type(leaf).__name__
            raise _unsupported(
                f"Orbax's layouts have no leaf of type {kind}; make it an array", structure, number
            )
    made = registry.codec_by_name("numpy").sources(list(arrays.values()))
    for source in made:
        source.mutable = False  # nobody else has it
    return dict(zip(arrays, made, strict=True))


def _text_of(leaf: Leaf, source: ArraySource | None) -> str | None:
    """The text of a string; long ones have been taken apart as arrays of bytes."""
    if isinstance(leaf, str):
        return leaf
    if source is None or source.framework != "str":
        return None
    (block,) = source.blocks
    return view_of(block, 1, np.dtype(np.uint8)).tobytes().decode("utf-8", "surrogatepass")


def _check_text(text: str, structure: Structure, leaf: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _unsupported("its text is not Unicode, as JSON has to be", structure, leaf) from None


def _kind_of(leaf: Leaf, source: ArraySource) -> str:
    if not isinstance(leaf, ArrayLeaf):
        return SCALAR
    return JAX_ARRAY if source.framework == "jax" else NUMPY_ARRAY


def _check_array(source: ArraySource, structure: Structure, leaf: int) -> None:
    if source.framework == "bytes":
        raise _unsupported("Orbax's layouts have no leaf of type bytes; make it an array", structure, leaf)
    if not dtypes.is_key(source.dtype) and source.dtype not in _KNOWN_TO_ZARR:
        raise _unsupported(f"Orbax's layouts have no arrays of {source.dtype}; cast it", structure, leaf)


def _check_name(name: str, structure: Structure, leaf: int) -> None:
    """Refuses a name that is not that of a place inside of the directory; a slash in it makes one more."""
    problem = None
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        parts, problem = [], "has characters that no file name can have"
    if name and any(part in (b"", b".", b"..") for part in parts):
        problem = "is no path"
    elif b"\0" in name.encode("utf-8", "replace"):
        problem = "has characters that no file name can have"
    elif any(len(part) > _NAME_LIMIT_BYTES for part in parts):
        problem = f"has more than {_NAME_LIMIT_BYTES} bytes, which no file name may have"
    if problem is not None:
        path = format_key_path(structure.key_paths()[leaf])
        raise InvalidInput(
            f"Orbax names a leaf by its keys joined with dots, and {name[:100]!r} {problem}; rename the keys "
            f"of {path}, {_OR_NATIVE}",
            array=path,
        )


def _check_distinct(found: Leaves) -> None:
    """Refuses leaves that would be stored in one place, or could not be told apart when they are read."""
    by_keys: dict[tuple[str, ...], Place] = {}
    by_name: dict[tuple[str, bool], Place] = {}
    for place in found.places:
        is_text = place.leaf is not None and found.kinds[place.leaf] == STRING
        others = [by_keys.setdefault(place.keys, place)]
        if place.leaf is not None:
            others.append(by_name.setdefault((".".join(place.keys), is_text), place))
        other = next((other for other in others if other is not place), None)
        if other is not None:
            one, two = (".".join(repr(key) for key in each.keys) for each in (other, place))
            raise InvalidInput(
                "two leaves would be stored in one place, as Orbax names a leaf by its keys joined with "
                f"dots: those with the keys {one} and {two}; rename one, {_OR_NATIVE}",
                array=".".join(place.keys),
            )


def _unsupported(problem: str, structure: Structure, leaf: int) -> UnsupportedLeaf:
    path = format_key_path(structure.key_paths()[leaf])
    return UnsupportedLeaf(f"leaf {path}: {problem}, {_OR_NATIVE}", array=path)
