"""From what each process has written to the tables of a checkpointable: the primary's part of a save.

Merging looks at no data. It proves that the chunks of all processes cover every array exactly once (where a
host has a storage of its own: at most once), finds the regular grid that they form, where they do, and the
runs that say where chunks are, where these are few.

A program of N processes and M arrays has up to N * M chunks, which are never all in memory: arrays are
taken one after another, and only what goes into the tables is kept. What processes have in common is looked
at once, and so are arrays of equal shape that are cut alike; for every chunk a few steps of NumPy remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waystation import grid
from waystation._collection import paused_collection
from waystation._distinct import distinct_objects
from waystation._errors import InvalidInput
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import names, tables
from waystation.layouts.native.parts import WHOLE, Part, Recipe
from waystation.layouts.native.records import DataPlace
from waystation.layouts.native.statements import Said, starts

__all__ = ["Part", "merge", "places", "whole_arrays"]

Integers = npt.NDArray[np.int64]

# From so many chunks on an array is described by runs, if there are fewer than a quarter as many.
RUNS_FROM_CHUNKS = 64
_CHUNKS_PER_RUN = 4


@paused_collection()
def merge(
    parts: Sequence[Part], sources: Sequence[ArraySource], labels: Sequence[str], partial: bool = False
) -> tables.Tables:
    """The tables of all parts.

    Args:
        parts: In the order of their processes.
        sources: All arrays.
        labels: Their key paths.
        partial: Whether the parts may leave holes, as those of one host do where each has a storage of
            its own.

    Raises:
        InvalidInput: The chunks of all processes leave a hole in an array or overlap: names it, the place
            and the processes.
    """
    said = Said.by(parts, sources)
    if any(part.places for part in parts):
        said.files["location"] = _locations(parts)
    entries, chunks, dims = _Arranging(said, sources, labels, partial).arrange()
    checksums = np.concatenate([part.checksums for part in parts])
    return tables.Tables(said.files, entries, chunks, dims, checksums)


def places(parts: Sequence[Part]) -> tuple[DataPlace, ...]:
    """Where the files of all parts are that are not in the directory of the state: what the locations in the
    merged table count from 1."""
    return tuple(dict.fromkeys(place for part in parts for place in part.places))


def _locations(parts: Sequence[Part]) -> npt.NDArray[np.int64]:
    """The location of each file of all parts, each of which counts its own places."""
    numbers = {place: number for number, place in enumerate(places(parts), 1)}
    found = [
        np.array([0, *(numbers[place] for place in part.places)], np.int64)[part.files["location"]]
        for part in parts
    ]
    return np.concatenate(found)


def whole_arrays(parts: Sequence[Part], labels: Sequence[str]) -> dict[str, str]:
    """For every array that is one tensor of one file: its label and the name of the file."""
    found: dict[str, str] = {}
    known: dict[bytes, list[tuple[int, int]]] = {}
    for part in parts:
        pairs = known.get(part.recipe)
        if pairs is None:
            recipe = Recipe.decode(part.recipe)
            is_whole = recipe.boxes == WHOLE
            files = np.repeat(np.arange(len(recipe.chunk_counts)), recipe.chunk_counts)[is_whole]
            pairs = list(zip(recipe.arrays[is_whole].tolist(), files.tolist(), strict=True))
            known[part.recipe] = pairs
        if pairs:
            rows = zip(part.files["process"].tolist(), part.files["sequence"].tolist(), strict=True)
            file_names = [names.data_file(*row) for row in rows]
            found.update((labels[number], file_names[file]) for number, file in pairs)
    return found


@dataclass(slots=True)
class _Arrangement:
    """How the chunks of an array stand: their kind, its dims, and the order among the chunks expanded."""

    kind: int
    words: tables.Table
    order: Integers


class _Arranging:
    """Arranges the chunks of array after array into a grid, runs or a list of boxes."""

    def __init__(
        self, said: Said, sources: Sequence[ArraySource], labels: Sequence[str], partial: bool
    ) -> None:
        self._said = said
        self._sources, self._labels = sources, labels
        self._partial = partial
        self._known: dict[tuple[tuple[int, ...], bytes, bytes], _Arrangement] = {}
        self._data_starts = said.files["data_start"].astype(np.int64)

    def arrange(self) -> tuple[tables.Table, tables.Table, tables.Table]:
        """The array entries, the chunk entries and the dims."""
        said, sources = self._said, self._sources
        entries = np.zeros(len(sources), tables.ARRAY_ENTRY)
        per_array = np.bincount(said.arrays, minlength=len(sources))
        begins = starts(per_array)
        # Of most arrays one process has written the whole: nothing about them needs a look.
        is_simple = self._are_simple(per_array, begins)
        kinds, which = distinct_objects(sources)
        ndims = np.array([len(kind.storage_shape) for kind in kinds], np.int64)[which]
        counts, dim_counts = is_simple.astype(np.int64), 2 * ndims
        pieces: dict[int, tables.Table] = {}
        words: dict[int, tables.Table] = {}
        for number in np.flatnonzero(~is_simple).tolist():
            begin, shape = int(begins[number]), sources[number].storage_shape
            kind, own, chunks = self._arrange_one(number, shape, begin, begin + int(per_array[number]))
            entries["kind"][number], counts[number], dim_counts[number] = kind, len(chunks), len(own)
            words[number], pieces[number] = own, chunks
        first_dims = starts(dim_counts)
        dims = np.zeros(int(dim_counts.sum()), np.uint64)
        extents = np.array([extent for kind in kinds for extent in kind.storage_shape * 2], np.uint64)
        of_kinds = starts([2 * len(kind.storage_shape) for kind in kinds])[which]
        simple = np.flatnonzero(is_simple)
        lengths = dim_counts[simple]
        axes = np.arange(int(lengths.sum())) - np.repeat(starts(lengths), lengths)
        dims[np.repeat(first_dims[simple], lengths) + axes] = extents[
            np.repeat(of_kinds[simple], lengths) + axes
        ]
        for number, own in words.items():
            dims[first_dims[number] : first_dims[number] + len(own)] = own
        entries["ndim"] = ndims
        entries["item_bits"] = 8 * np.array([kind.storage_item_bytes for kind in kinds], np.int64)[which]
        entries["first_chunk"], entries["chunk_count"] = starts(counts), counts
        entries["first_dim"], entries["dim_count"] = first_dims, dim_counts
        chunks = np.zeros(int(counts.sum()), tables.CHUNK_ENTRY)
        simple_chunks = self._chunks(*said.expand(begins[is_simple]))
        chunks[entries["first_chunk"][is_simple].astype(np.int64)] = simple_chunks
        for number, piece in pieces.items():
            first = int(entries["first_chunk"][number])
            chunks[first : first + len(piece)] = piece
        return entries, chunks, dims

    def _are_simple(self, per_array: Integers, begins: Integers) -> npt.NDArray[np.bool_]:
        said = self._said
        is_simple: npt.NDArray[np.bool_] = per_array == 1
        own = begins[is_simple]
        is_simple[is_simple] = (said.boxes[own] == WHOLE) & (said.member_counts[said.recipes[own]] == 1)
        return is_simple

    def _chunks(self, statements: Integers, processes: Integers) -> tables.Table:
        """Their entries."""
        said = self._said
        files = said.first_files[processes] + said.file_places[statements]
        chunks = np.zeros(len(statements), tables.CHUNK_ENTRY)
        chunks["file"] = files
        chunks["offset"] = self._data_starts[files] + said.offsets[statements]
        chunks["length"] = said.lengths[statements]
        return chunks

    def _arrange_one(
        self, number: int, shape: tuple[int, ...], begin: int, end: int
    ) -> tuple[int, tables.Table, tables.Table]:
        """Kind, dims and chunk entries of one array, of which a range of statements speaks."""
        said = self._said
        statements, processes = said.expand(np.arange(begin, end))
        chunks = self._chunks(statements, processes)
        key = shape, said.recipes[begin:end].tobytes(), said.boxes[begin:end].tobytes()
        known = self._known.get(key)
        if known is None:
            boxes = self._boxes(shape, statements, processes)
            known = self._known[key] = self._examine(number, shape, boxes, processes)
        chunks = chunks[known.order]
        if known.kind == tables.REGULAR and len(chunks) >= RUNS_FROM_CHUNKS:
            runs = grid.find_runs(
                chunks["file"].astype(np.int64),
                said.offsets[statements][known.order],
                len(chunks) // _CHUNKS_PER_RUN,
            )
            if runs is not None:
                return tables.RUNS, np.concatenate([known.words, grid.words_of_runs(runs)]), chunks[:0]
        return known.kind, known.words, chunks

    def _boxes(self, shape: tuple[int, ...], statements: Integers, processes: Integers) -> grid.BoxArray:
        said = self._said
        boxes = np.zeros((len(statements), 2, len(shape)), np.int64)
        boxes[:, 1] = shape
        boxed = np.flatnonzero(said.boxes[statements] != WHOLE)
        own, axes = statements[boxed], np.arange(len(shape))
        firsts = said.first_words[processes[boxed]] + said.box_words[own]
        boxes[boxed, 0] = said.words[firsts[:, None] + axes]
        boxes[boxed, 1] = said.extents[said.box_extents[own][:, None] + axes]
        return boxes

    def _examine(
        self, number: int, shape: tuple[int, ...], boxes: grid.BoxArray, processes: Integers
    ) -> _Arrangement:
        if not len(boxes) and not all(shape):
            return _Arrangement(tables.REGULAR, np.array(shape * 2, np.uint64), np.empty(0, np.int64))
        found = grid.find_grid(shape, boxes) if len(boxes) else None
        if found is not None:
            return _Arrangement(tables.REGULAR, np.array(shape + found[0].chunk_shape, np.uint64), found[1])
        kind, defect = tables.IRREGULAR, grid.find_cover_defect(shape, boxes)
        if self._partial and defect is not None and defect.kind == "hole":
            kind, defect = tables.PARTIAL, grid.find_cover_defect(shape, boxes, holes_allowed=True)
        if defect is not None:
            raise self._uncovered(number, shape, defect, processes)
        irregular, order = grid.IrregularBoxes.sort(boxes, len(shape))
        words = np.concatenate([np.array(shape, np.uint64), irregular.to_words()])
        return _Arrangement(kind, words, order)

    def _uncovered(
        self, number: int, shape: tuple[int, ...], defect: grid.CoverDefect, processes: Integers
    ) -> InvalidInput:
        files = self._said.first_files[processes[list(defect.positions)]]
        writers = sorted(set(self._said.files["process"][files].tolist()))
        begin, extent = defect.box
        where = ", ".join(f"{at}:{at + length}" for at, length in zip(begin, extent, strict=True))
        what = {
            "hole": "is written by no process",
            "overlap": f"is written more than once, by processes {writers}",
            "outside": f"lies outside of it, yet process {writers} writes it",
        }[defect.kind]
        return InvalidInput(
            f"the part [{where}] of an array of shape {shape} {what}; all processes must save the same "
            "arrays with the same shardings",
            array=self._labels[number],
        )
