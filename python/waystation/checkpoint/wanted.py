"""What a load is to produce: for each leaf of the result, the stored leaf it takes and its abstract form.

Everything that can be refused is refused here, before a data file is opened: other structure, other
shapes, impossible conversions. All differences are collected into one error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from waystation._errors import InvalidInput, StructureMismatch
from waystation.checkpoint.prepare import SCALARS
from waystation.frameworks import registry
from waystation.layouts.native.tree_file import ArrayLeaf, Leaf, Scalar, TreeFile
from waystation.tree import Structure, describe_difference, flatten, format_key_path, match

_NUMBERS = (bool, int, float, complex)


@dataclass(slots=True)
class Decided:
    """The result's structure and where each of its leaves comes from.

    Attributes:
        structure: Of the result.
        stored: The stored leaf of each leaf.
        abstracts: The abstract leaf of each, None when everything comes back as it was saved.
    """

    structure: Structure
    stored: list[Leaf]
    abstracts: list[Any] | None

    def key_path(self, number: int) -> str:
        """Key path of a leaf, for messages."""
        return format_key_path(self.structure.key_paths()[number])


def as_saved(tree: TreeFile) -> Decided:
    """Everything as it was saved."""
    return Decided(tree.structure, tree.leaves, None)


def as_asked(tree: TreeFile, abstract_state: Any) -> Decided:
    """What an abstract state asks for.

    Raises:
        StructureMismatch: It has other leaves than the checkpoint, or other shapes.
        InvalidInput: An abstract leaf is nothing that a stored leaf could become.
    """
    abstracts, structure = flatten(abstract_state)
    decided = Decided(structure, [], abstracts)
    found = match(tree.structure, structure)
    if isinstance(found, list):
        decided.stored = [tree.leaves[number] for number in found]
        _check_kinds(decided)
        if not _shapes_differ(tree, decided):
            return decided
    raise StructureMismatch(
        "the checkpoint and the abstract state differ:\n"
        + describe_difference(
            tree.structure,
            structure,
            lambda number: _stored_text(tree, tree.leaves[number]),
            lambda number: _wanted_text(abstracts[number]),
        )
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
        try:
            converted: Scalar = wanted(value)  # type: ignore[arg-type]
        except (TypeError, OverflowError, ValueError) as error:
            raise InvalidInput(f"{value!r} cannot be loaded as {wanted.__name__}: {error}") from error
        if converted == value or value != value:
            return converted
    raise InvalidInput(f"a stored {kind.__name__} ({value!r:.60}) cannot be loaded as {wanted.__name__}")


def _check_kinds(decided: Decided) -> None:
    for number, abstract in enumerate(decided.abstracts or ()):
        if is_scalar(abstract) or registry.codec_for(abstract) is not None:
            continue
        raise InvalidInput(
            f"abstract leaf {decided.key_path(number)} is a {type(abstract).__name__}; "
            "give an abstract array "
            "(jax.ShapeDtypeStruct, a tensor, a NumPy array) or a scalar or its type",
            array=decided.key_path(number),
        )


def _shapes_differ(tree: TreeFile, decided: Decided) -> bool:
    return any(
        wanted is not None and wanted != _stored_text(tree, leaf)
        for leaf, abstract in zip(decided.stored, decided.abstracts or (), strict=True)
        for wanted in (_wanted_text(abstract),)
    )


def _stored_text(tree: TreeFile, leaf: Leaf) -> str | None:
    if type(leaf) is ArrayLeaf:
        array = tree.arrays[leaf.array]
        return _LONG_SCALARS.get(array.framework) or f"shape {array.shape}"
    if type(leaf) in _NUMBERS:
        return "shape ()"
    return type(leaf).__name__


def _wanted_text(abstract: Any) -> str | None:
    if not is_scalar(abstract):
        return f"shape {tuple(abstract.shape)}"
    wanted = scalar_type(abstract)
    return "shape ()" if wanted in _NUMBERS else wanted.__name__


_LONG_SCALARS = {"bytes": "bytes", "str": "str"}
