"""What a load is to produce: for each leaf of the result, the stored leaf it takes and its abstract form.

Everything that can be refused is refused here, before a data file is opened: other structure, other
shapes, impossible conversions. All differences are collected into one error. Invariants: an abstract array
has as many axes as the stored one, and the same extents unless `Decided.extents` says otherwise; a leaf that
is not to be loaded is `PLACEHOLDER` as stored leaf and as abstract leaf, and in the result unless it is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from waystation._errors import InvalidInput, LossyCast, StructureMismatch, WaystationError, WrongType
from waystation._options import PyTreeLoadingOptions
from waystation.checkpoint.prepare import SCALARS
from waystation.frameworks import dtypes, registry
from waystation.frameworks.base import StoredArray
from waystation.frameworks.described import is_described, standing_for
from waystation.layouts.opened import ArrayLeaf, Leaf, Scalar, StoredTree
from waystation.tree import (
    Mismatch,
    Structure,
    Tolerance,
    describe_difference,
    flatten,
    format_key_path,
    match,
)

# In the place of a leaf: it is not to be loaded.
PLACEHOLDER = ...

_NUMBERS = (bool, int, float, complex)
_SUBSET_ADVICE = "\nto load only what the abstract state has, set the option pytree.loading.partial_load"
_SUPERSET_ADVICE = (
    "\nto leave out what the checkpoint lacks, put waystation.PLACEHOLDER (...) there in the abstract state; "
    "to have its own leaves there, set the option pytree.loading.keep_missing"
)
_NONE_ADVICE = (
    "\nNone stands for None only: to leave out what the checkpoint has there, put "
    "waystation.PLACEHOLDER (...) there in the abstract state"
)
_KEYS_ADVICE = (
    "\nthe checkpoint has typed PRNG keys at {path}: ask for those (of the dtype of jax.random.key(0)), and "
    "use jax.random.key_data afterwards"
)
_KEY_DATA_ADVICE = (
    "\nthe abstract state has typed PRNG keys at {path}, the checkpoint an array: ask for that, and use "
    "jax.random.wrap_key_data afterwards"
)
_EXTENTS_ADVICE = (
    "\nto load what arrays of other extents have in common, and zeros beyond, set the option "
    "array.loading.enable_padding_and_truncation"
)


@dataclass(slots=True)
class Decided:
    """The result's structure and where each of its leaves comes from.

    Attributes:
        structure: Of the result.
        stored: The stored leaf of each leaf, or `PLACEHOLDER`.
        abstracts: The abstract leaf of each, None when everything comes back as it was saved.
        extents: The wanted shapes of arrays that were saved with other extents, by leaf.
        tolerance: What the checkpoint may differ in.
        kept: Leaves of the abstract state that the result has as they were given, by number.
    """

    structure: Structure
    stored: list[Any]
    abstracts: list[Any] | None
    extents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=Tolerance)
    kept: dict[int, Any] = field(default_factory=dict)

    def key_path(self, number: int) -> str:
        """Key path of a leaf, for messages."""
        return format_key_path(self.structure.key_paths()[number])

    def name_for(self, error: WaystationError, number: int) -> str:
        """What an error calls the array of a leaf: its key path, or in a lossy cast the label of the saved
        array, as wherever else elements are read or written."""
        return self.structure.labels()[number] if isinstance(error, LossyCast) else self.key_path(number)


def as_saved(tree: StoredTree, loading: PyTreeLoadingOptions) -> Decided:
    """Everything as it was saved, or of it what is selected."""
    if loading.select is None:
        return Decided(tree.structure, tree.leaves, None)
    pairs = zip(tree.leaves, tree.structure.labels(), strict=True)
    stored = [leaf if loading.selected(label) else PLACEHOLDER for leaf, label in pairs]
    return Decided(tree.structure, stored, None)


def as_asked(tree: StoredTree, abstract_state: Any, loading: PyTreeLoadingOptions) -> Decided:
    """What an abstract state asks for. Its shapes are left to `check_shapes`.

    Raises:
        StructureMismatch: It has other leaves than the checkpoint.
        InvalidInput: An abstract leaf is nothing that a stored leaf could become.
    """
    abstracts, structure = flatten(abstract_state, is_described)
    if loading.select is not None:
        pairs = zip(abstracts, structure.labels(), strict=True)
        abstracts = [leaf if loading.selected(label) else PLACEHOLDER for leaf, label in pairs]
    absent = frozenset(number for number, leaf in enumerate(abstracts) if leaf is PLACEHOLDER)
    decided = Decided(structure, [], abstracts, tolerance=Tolerance(absent, loading.partial_load))
    found = match(tree.comparable(tree.structure), tree.comparable(structure), decided.tolerance)
    if isinstance(found, Mismatch):
        # What has something else there is unexpected as well.
        if not loading.keep_missing or found.unexpected:
            raise _mismatch(tree, decided, advice=_advice(found))
        lacking = [number for number, place in enumerate(found.leaves) if place < 0 and number not in absent]
        decided.kept = {number: abstracts[number] for number in lacking}
        absent, found = absent.union(lacking), found.leaves
        abstracts = [PLACEHOLDER if number in absent else leaf for number, leaf in enumerate(abstracts)]
    decided.stored = [
        PLACEHOLDER if number in absent else tree.leaves[place] for number, place in enumerate(found)
    ]
    decided.abstracts = [_known(tree, decided, number, abstract) for number, abstract in enumerate(abstracts)]
    _check_kinds(decided)
    decided.extents = _other_extents(tree, decided)
    return decided


def _advice(found: Mismatch) -> str:
    """How to have what was asked for all the same, where that is possible."""
    if not found.missing:
        return _SUBSET_ADVICE
    if any(found.wanted.nodes[there].kind == "none" for there in found.clashes):
        return _NONE_ADVICE
    return "" if found.unexpected else _SUPERSET_ADVICE


def check_shapes(tree: StoredTree, decided: Decided, *, extents_may_differ: bool) -> None:
    """Refuses arrays that are wanted with another shape than they were saved with.

    Args:
        tree: What is stored.
        decided: What is wanted.
        extents_may_differ: Take other extents along the same number of axes.

    Raises:
        StructureMismatch: There are such arrays.
        InvalidInput: There are PRNG keys among those that may differ.
    """
    if decided.abstracts is None:
        return
    taken = decided.extents if extents_may_differ else {}
    if _shapes_differ(tree, decided, taken):
        advice = "" if extents_may_differ or not decided.extents else _EXTENTS_ADVICE
        raise _mismatch(tree, decided, taken, advice + _key_advice(tree, decided))
    for number in taken:
        stored = _array(tree, decided, number)
        if dtypes.is_key(stored.dtype):
            raise InvalidInput(
                f"PRNG keys of shape {stored.shape} cannot be loaded with the shape {taken[number]}: keys "
                "are neither padded nor truncated; give the saved shape",
                array=decided.key_path(number),
            )


def is_scalar(abstract: Any) -> bool:
    """Whether an abstract leaf stands for a scalar: a value or one of the types."""
    return type(abstract) in SCALARS or (isinstance(abstract, type) and abstract in SCALARS)


def scalar_type(abstract: Any) -> type[Scalar]:
    """The type of scalar that an abstract leaf stands for."""
    return abstract if isinstance(abstract, type) else type(abstract)


def convert(value: Scalar, wanted: type[Scalar]) -> Scalar:
    """A stored scalar as the type that is wanted.

    Raises:
        InvalidInput: The value cannot be had as that type without loss of its meaning.
    """
    kind = type(value)
    if kind is wanted:
        return value
    if kind in _NUMBERS and wanted in _NUMBERS:
        with contextlib.suppress(TypeError, OverflowError, ValueError):
            converted: Scalar = wanted(value)  # type: ignore[arg-type]
            if converted == value or (value != value and converted != converted):  # NaN stays NaN
                return converted
    raise InvalidInput(
        f"the stored {kind.__name__} {_shown(value)} cannot be loaded as {wanted.__name__}, which would lose "
        f"something of it; ask for {kind.__name__}, and convert it afterwards"
    )


def _shown(value: Scalar) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python does not write integers of thousands of digits
        return f"of {value.bit_length()} bits" if isinstance(value, int) else ""


def _mismatch(
    tree: StoredTree, decided: Decided, taken: Container[int] = (), advice: str = ""
) -> StructureMismatch:
    abstracts = decided.abstracts or []
    difference = describe_difference(
        tree.comparable(tree.structure),
        tree.comparable(decided.structure),
        lambda number: _stored_text(tree, tree.leaves[number]),
        lambda number: None if number in taken else _wanted_text(abstracts[number], names_keys=True),
        tolerance=decided.tolerance,
    )
    return StructureMismatch(f"the checkpoint and the abstract state differ:\n{difference}{advice}")


def _key_advice(tree: StoredTree, decided: Decided) -> str:
    """How to load PRNG keys as those, if only one side has them where shapes differ."""
    for number, (leaf, abstract) in enumerate(zip(decided.stored, decided.abstracts or (), strict=True)):
        if type(leaf) is not ArrayLeaf or not _differs(tree, leaf, abstract):
            continue
        is_stored = dtypes.is_key(tree.arrays[leaf.array].dtype)
        is_wanted = dtypes.is_key(str(getattr(abstract, "dtype", "")))
        if is_stored != is_wanted:
            advice = _KEYS_ADVICE if is_stored else _KEY_DATA_ADVICE
            return advice.format(path=decided.key_path(number))
    return ""


def _array(tree: StoredTree, decided: Decided, number: int) -> StoredArray:
    leaf = decided.stored[number]
    assert isinstance(leaf, ArrayLeaf)
    return tree.arrays[leaf.array]


def _other_extents(tree: StoredTree, decided: Decided) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for number, (leaf, abstract) in enumerate(zip(decided.stored, decided.abstracts or (), strict=True)):
        if type(leaf) is not ArrayLeaf or is_scalar(abstract):
            continue
        array, wanted = tree.arrays[leaf.array], _shape_of(abstract)
        if wanted is None or wanted == array.shape or array.framework in _LONG_SCALARS:
            continue
        if len(wanted) == len(array.shape):
            found[number] = wanted
    return found


def _known(tree: StoredTree, decided: Decided, number: int, abstract: Any) -> Any:
    """An abstract leaf as one of a framework, if it only describes an array."""
    if not is_described(abstract):
        return abstract
    leaf = decided.stored[number]
    stored = tree.arrays[leaf.array] if type(leaf) is ArrayLeaf else None
    try:
        return standing_for(abstract, stored)
    except InvalidInput as error:
        raise error.where(array=decided.key_path(number))


def _check_kinds(decided: Decided) -> None:
    for number, abstract in enumerate(decided.abstracts or ()):
        if abstract is PLACEHOLDER or is_scalar(abstract) or registry.codec_for(abstract) is not None:
            continue
        kind = (
            f"the type {abstract.__name__}"
            if isinstance(abstract, type)
            else f"of type {type(abstract).__name__}"
        )
        raise WrongType(
            f"abstract leaf {decided.key_path(number)} is {kind}; give an abstract array "
            "(jax.ShapeDtypeStruct, a tensor, a NumPy array) or a scalar or its type",
            array=decided.key_path(number),
        )


def _shapes_differ(tree: StoredTree, decided: Decided, taken: Container[int]) -> bool:
    return any(
        number not in taken and _differs(tree, leaf, abstract)
        for number, (leaf, abstract) in enumerate(zip(decided.stored, decided.abstracts or (), strict=True))
    )


def _differs(tree: StoredTree, leaf: Leaf, abstract: Any) -> bool:
    """Whether a leaf is of another shape or kind. A key is no scalar; dtypes of arrays are another matter."""
    if type(leaf) is ArrayLeaf and not is_scalar(abstract):  # nearly always, and there are thousands
        array = tree.arrays[leaf.array]
        if array.framework not in _LONG_SCALARS:
            shape = _shape_of(abstract)
            return shape is not None and shape != tuple(array.shape)
    wanted = _wanted_text(abstract)
    return wanted is not None and wanted != _stored_text(tree, leaf, names_keys=is_scalar(abstract))


def _stored_text(tree: StoredTree, leaf: Leaf, *, names_keys: bool = True) -> str | None:
    if type(leaf) is ArrayLeaf:
        array = tree.arrays[leaf.array]
        if names_keys and dtypes.is_key(array.dtype):
            return _keys_text(tuple(array.shape))
        return _LONG_SCALARS.get(array.framework) or _shape_text(tuple(array.shape))
    if type(leaf) in _NUMBERS:
        return _shape_text(())
    return type(leaf).__name__


def _wanted_text(abstract: Any, *, names_keys: bool = False) -> str | None:
    if not is_scalar(abstract):
        shape = _shape_of(abstract)
        if shape is not None and names_keys and dtypes.is_key(str(getattr(abstract, "dtype", ""))):
            return _keys_text(shape)
        return None if shape is None else _shape_text(shape)
    wanted = scalar_type(abstract)
    return _shape_text(()) if wanted in _NUMBERS else wanted.__name__


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"shape {shape}" if shape else "a number (shape ())"


def _keys_text(shape: tuple[int, ...]) -> str:
    return f"PRNG keys of shape {shape}" if shape else "a PRNG key (shape ())"


def _shape_of(abstract: Any) -> tuple[int, ...] | None:
    """None for leaves that are no arrays, which are refused elsewhere."""
    shape: Sequence[int] | None = getattr(abstract, "shape", None)
    return None if shape is None else tuple(shape)


_LONG_SCALARS = {"bytes": "bytes", "str": "str"}
