"""What the parts of all processes say of chunks, in columns.

A *statement* is what a recipe says of one chunk. Every part that has this recipe is a *member* of it, and
makes the statement for the process that wrote it. So statements are as many as one process has chunks, times
the recipes, which are few; the chunks of an array are its statements expanded to their members.

Invariants: statements are sorted by array; the bytes that they speak of, and those of no
chunk, fill the files of every part exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waystation._distinct import distinct_objects
from waystation._errors import InvalidInput
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import tables
from waystation.layouts.native.parts import WHOLE, Part, Recipe, box_volumes

Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Said:
    """What all parts say.

    Attributes:
        files: `FILE_ENTRY` of all files.
        first_files: Of each part, its first file among them.
        words: The offsets of the distinct boxes of all parts.
        first_words: Of each part, its first word there.
        members: The parts, by their places, sorted by recipe.
        first_members: Of each recipe, its first member there.
        member_counts: Of each recipe, the number of its members.
        recipes: The recipe of each statement.
        arrays: Its array.
        boxes: Its box among the distinct ones of the recipe, or `WHOLE`.
        box_words: Where the offset of its box is among the words of a member.
        box_extents: Where the shape of its box is in `extents`.
        file_places: Its file among those of a member.
        offsets: Where its bytes begin, counted from the first byte of data of the file.
        lengths: Their number.
        extents: The shapes of the distinct boxes of all recipes.
    """

    files: tables.Table
    first_files: Integers
    words: Integers
    first_words: Integers
    members: Integers
    first_members: Integers
    member_counts: Integers
    recipes: Integers
    arrays: Integers
    boxes: Integers
    box_words: Integers
    box_extents: Integers
    file_places: Integers
    offsets: Integers
    lengths: Integers
    extents: Integers

    @classmethod
    def by(cls, parts: Sequence[Part], sources: Sequence[ArraySource]) -> Said:
        """What these parts say of these arrays; refuses those that other arrays have made."""
        known: dict[bytes, int] = {}
        of_process = np.array([known.setdefault(part.recipe, len(known)) for part in parts], np.int64)
        recipes = [Recipe.decode(recipe) for recipe in known]
        member_counts = np.bincount(of_process, minlength=len(recipes))
        files = np.concatenate([part.files for part in parts])
        files["first_block"] = tables.first_blocks(files["file_bytes"])
        shapes = _Shapes.of(sources)
        statements = [_Statements.of(recipe, shapes) for recipe in recipes]
        arrays = np.concatenate([own.arrays for own in statements])
        order = np.argsort(arrays, kind="stable")
        extent_counts = [len(recipe.extents) for recipe in recipes]
        counts = [len(own.arrays) for own in statements]
        word_places = np.concatenate([own.box_words for own in statements])
        said = cls(
            files=files,
            first_files=starts([len(part.files) for part in parts]),
            words=np.concatenate([part.offsets for part in parts]),
            first_words=starts([len(part.offsets) for part in parts]),
            members=np.argsort(of_process, kind="stable"),
            first_members=starts(member_counts),
            member_counts=member_counts,
            recipes=np.repeat(np.arange(len(recipes)), counts)[order],
            arrays=arrays[order],
            boxes=np.concatenate([own.boxes for own in statements])[order],
            box_words=word_places[order],
            box_extents=(word_places + np.repeat(starts(extent_counts), counts))[order],
            file_places=np.concatenate([own.file_places for own in statements])[order],
            offsets=np.concatenate([own.offsets for own in statements])[order],
            lengths=np.concatenate([own.lengths for own in statements])[order],
            extents=np.concatenate([recipe.extents for recipe in recipes]),
        )
        said._check(parts, of_process, statements, extent_counts)
        return said

    def _check(
        self,
        parts: Sequence[Part],
        of_process: Integers,
        statements: Sequence[_Statements],
        extent_counts: Sequence[int],
    ) -> None:
        """Refuses parts that this process would take for other than they are: of other arrays or dtypes."""
        sizes = [own.file_bytes for own in statements]
        file_counts = np.array([len(own) for own in sizes], np.int64)[of_process]
        word_counts = np.asarray(extent_counts, np.int64)[of_process]
        stated = (
            np.array([len(part.files) for part in parts]),
            np.array([len(part.offsets) for part in parts]),
        )
        if np.array_equal(stated[0], file_counts) and np.array_equal(stated[1], word_counts):
            data_bytes = np.concatenate([sizes[recipe] for recipe in of_process.tolist()])
            present = self.files["file_bytes"].astype(np.int64) - self.files["data_start"].astype(np.int64)
            wrong = np.flatnonzero(present != data_bytes)
            if not len(wrong):
                return
            process = int(self.files["process"][wrong[0]])
        else:
            process = int(np.argmax((stated[0] != file_counts) | (stated[1] != word_counts)))
        raise InvalidInput(
            f"process {process} has written files of other lengths than the arrays of this process make; all "
            "processes must save the same arrays with the same dtypes"
        )

    def expand(self, statements: Integers) -> tuple[Integers, Integers]:
        """Of every chunk that statements speak of: its statement, and the place of the part that says so."""
        recipes = self.recipes[statements]
        counts = self.member_counts[recipes]
        before = np.repeat(self.first_members[recipes] - starts(counts), counts)
        return np.repeat(statements, counts), self.members[before + np.arange(len(before))]


@dataclass(slots=True)
class _Statements:
    """What one recipe says of each of its chunks, see `Said`; and the bytes of data of its files."""

    arrays: Integers
    boxes: Integers
    box_words: Integers
    file_places: Integers
    offsets: Integers
    lengths: Integers
    file_bytes: Integers

    @classmethod
    def of(cls, recipe: Recipe, shapes: _Shapes) -> _Statements:
        arrays, boxes = recipe.arrays.astype(np.int64), recipe.boxes.astype(np.int64)
        ndims, counts = recipe.ndims.astype(np.int64), recipe.chunk_counts.astype(np.int64)
        is_boxed = boxes != WHOLE
        differ = ndims[boxes[is_boxed]] != shapes.ndims[arrays[is_boxed]]
        if differ.any():
            array = int(arrays[is_boxed][np.argmax(differ)])
            raise InvalidInput(f"a process has written array {array} with another number of axes")
        volumes = np.array([*box_volumes(recipe), 0], np.int64)  # the last one is that of `WHOLE`
        items = np.where(is_boxed, volumes[boxes], shapes.volumes[arrays])
        lengths = items * shapes.item_bytes[arrays]
        dead = recipe.dead if len(recipe.dead) else np.zeros(len(arrays) + len(counts), np.int64)
        before, after = dead[: len(arrays)], dead[len(arrays) :]
        ends = np.concatenate([[0], np.cumsum(before + lengths)])
        begins_of_files = ends[starts(counts)]
        return cls(
            arrays,
            boxes,
            np.array([*starts(ndims).tolist(), 0], np.int64)[boxes],
            np.repeat(np.arange(len(counts)), counts),
            ends[1:] - lengths - np.repeat(begins_of_files, counts),
            lengths,
            ends[starts(counts) + counts] - begins_of_files + after,
        )


@dataclass(slots=True)
class _Shapes:
    """Of each array the number of its axes and elements, and the bytes of one, in storage."""

    ndims: Integers
    volumes: Integers
    item_bytes: Integers

    @classmethod
    def of(cls, sources: Sequence[ArraySource]) -> _Shapes:
        kinds, which = distinct_objects(sources)
        return cls(
            np.array([len(kind.storage_shape) for kind in kinds], np.int64)[which],
            np.array([math.prod(kind.storage_shape) for kind in kinds], np.int64)[which],
            np.array([kind.storage_item_bytes for kind in kinds], np.int64)[which],
        )


def starts(counts: Sequence[int] | Integers) -> Integers:
    """Where each begins, if so many of each follow one another."""
    lengths = np.asarray(counts, np.int64)
    return np.cumsum(lengths) - lengths
