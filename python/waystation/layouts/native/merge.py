"""From what each process has written to the tables of a checkpointable: the primary's part of a save.

A *part* is what one process says about its files: their lengths, which box of which array each chunk is,
where it lies, and the checksums of its blocks. Merging looks at no data. It proves that the chunks of all
processes cover every array exactly once, and finds the regular grid that they form, where they do.

Invariants: a part is only ever read by the save that wrote it, so its encoding has no version; arrays of
equal shape that are cut alike are examined once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from waystation import grid
from waystation._collection import paused_collection
from waystation._errors import Corrupt, InvalidInput
from waystation.frameworks.base import ArraySource
from waystation.layouts.native import names, tables
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.write_plan import WritePlan

_FORMATS = (
    tables.FILE_ENTRY,
    tables.CHUNK_ENTRY,
    np.dtype("<i8"),
    np.dtype("?"),
    np.dtype("<i8"),
    np.dtype("<u8"),
)


@dataclass(slots=True)
class Part:
    """What one process has written.

    Attributes:
        files: `FILE_ENTRY` of each file.
        chunks: `CHUNK_ENTRY` of each chunk that has bytes; files are counted from the first of the part.
        arrays: The array of each such chunk, int64.
        whole: Whether it is the whole array, bool.
        bounds: For each that is not, its offset, then its shape, int64, one after another.
        checksums: Of each block of each file, uint64.
    """

    files: tables.Table
    chunks: tables.Table
    arrays: tables.Table
    whole: tables.Table
    bounds: tables.Table
    checksums: tables.Table

    @classmethod
    def of(cls, plan: WritePlan, chunks: Sequence[Chunk], checksums: Sequence[bytes]) -> Part:
        """What has been written by a plan, with the checksums that the writing yielded."""
        places = [place for place, chunk in enumerate(chunks) if chunk.nbytes]
        kept = [chunks[place] for place in places]
        bounds: list[int] = []
        for chunk in kept:
            if chunk.offset is not None:
                bounds += chunk.offset
                bounds += chunk.shape
        return cls(
            plan.file_entries,
            plan.chunk_entries[places],
            np.array([chunk.array for chunk in kept], np.int64),
            np.array([chunk.offset is None for chunk in kept], bool),
            np.asarray(bounds, np.int64),
            np.frombuffer(b"".join(checksums), "<u8"),
        )

    def encode(self) -> bytes:
        """As bytes: the lengths of the sections, then these."""
        sections = [
            np.ascontiguousarray(section).tobytes()
            for section in (
                self.files,
                self.chunks,
                self.arrays,
                self.whole,
                self.bounds,
                self.checksums,
            )
        ]
        return np.array([len(section) for section in sections], "<i8").tobytes() + b"".join(sections)

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Reads what `encode` made.

        Raises:
            Corrupt: It did not make these bytes.
        """
        begin = 8 * len(_FORMATS)
        lengths = np.frombuffer(data[:begin], "<i8").tolist() if len(data) >= begin else [-1]
        if min(lengths) < 0 or begin + sum(lengths) != len(data):
            raise Corrupt(f"{len(data)} bytes are not what a process wrote about its files")
        found = []
        for length, form in zip(lengths, _FORMATS, strict=True):
            found.append(np.frombuffer(data, form, length // form.itemsize, begin))
            begin += length
        return cls(*found)


@paused_collection()
def merge(parts: Sequence[Part], sources: Sequence[ArraySource], labels: Sequence[str]) -> tables.Tables:
    """The tables of all parts, which are in the order of their processes.

    Raises:
        InvalidInput: The chunks of all processes leave a hole in an array or overlap: names it, the place
            and the processes.
    """
    files = np.concatenate([part.files for part in parts])
    chunks = np.concatenate([part.chunks for part in parts])
    counts = [len(part.files) for part in parts]
    firsts = np.cumsum(counts) - counts
    chunks["file"] += np.repeat(firsts, [len(part.chunks) for part in parts]).astype(np.uint32)
    files["first_block"] = tables.first_blocks(files["file_bytes"])
    described, dims, order = _Arranging(
        files,
        chunks,
        np.concatenate([part.arrays for part in parts]),
        np.concatenate([part.whole for part in parts]),
        np.concatenate([part.bounds for part in parts]),
        sources,
        labels,
    ).arrange()
    checksums = np.concatenate([part.checksums for part in parts])
    return tables.Tables(files, described, chunks[order], dims, checksums)


def whole_arrays(parts: Sequence[Part], labels: Sequence[str]) -> dict[str, str]:
    """For every array that is one tensor of one file: its label and the name of the file."""
    found: dict[str, str] = {}
    for part in parts:
        rows = zip(part.files["process"].tolist(), part.files["sequence"].tolist(), strict=True)
        file_names = [names.data_file(*row) for row in rows]
        arrays, files = part.arrays[part.whole].tolist(), part.chunks["file"][part.whole].tolist()
        found.update((labels[array], file_names[file]) for array, file in zip(arrays, files, strict=True))
    return found


class _Arranging:
    """Sorts chunks by array and, within it, into a grid or a list of boxes."""

    def __init__(
        self,
        files: tables.Table,
        chunks: tables.Table,
        arrays: tables.Table,
        whole: tables.Table,
        bounds: tables.Table,
        sources: Sequence[ArraySource],
        labels: Sequence[str],
    ) -> None:
        self._files, self._chunks, self._arrays, self._bounds = files, chunks, arrays, bounds
        self._sources, self._labels = sources, labels
        self._ndims = np.array([len(source.storage_shape) for source in sources], np.int64)
        self._whole = whole
        widths = np.where(whole, 0, 2 * self._ndims[arrays])
        self._first_words = np.cumsum(widths) - widths
        self._known: dict[tuple[tuple[int, ...], bytes], tuple[int, tuple[int, ...], tables.Table]] = {}

    def arrange(self) -> tuple[tables.Table, tables.Table, tables.Table]:
        """The array entries, the dims, and the order in which the chunks stand."""
        sources = self._sources
        entries = np.zeros(len(sources), tables.ARRAY_ENTRY)
        per_array = np.bincount(self._arrays, minlength=len(sources))[: len(sources)]
        first_chunks = np.cumsum(per_array) - per_array
        order = np.argsort(self._arrays, kind="stable")
        # Of most arrays one process has written the whole: nothing about them needs a look.
        simple = np.zeros(len(sources), bool)
        simple[self._arrays[self._whole]] = True
        simple &= per_array == 1
        dims: list[int] = []
        first_dims: list[int] = []
        rows = zip(simple.tolist(), first_chunks.tolist(), per_array.tolist(), sources, strict=True)
        for number, (is_simple, begin, count, source) in enumerate(rows):
            first_dims.append(len(dims))
            if is_simple:
                dims += source.storage_shape * 2
                continue
            own = order[begin : begin + count]
            kind, words, places = self._arrangement(number, source.storage_shape, own)
            entries["kind"][number] = kind
            dims += words
            order[begin : begin + count] = own[places]
        entries["ndim"] = self._ndims
        entries["item_bits"] = [8 * source.storage_item_bytes for source in sources]
        entries["first_chunk"], entries["chunk_count"] = first_chunks, per_array
        entries["first_dim"] = first_dims
        entries["dim_count"] = np.diff(np.asarray([*first_dims, len(dims)], np.int64))
        return entries, np.asarray(dims, "<u8"), order

    def _arrangement(
        self, number: int, shape: tuple[int, ...], own: tables.Table
    ) -> tuple[int, tuple[int, ...], tables.Table]:
        """Kind, dims and the order of the chunks `own` of one array."""
        width = 2 * len(shape)
        whole = np.array((0,) * len(shape) + shape, np.int64)
        words = [
            whole if self._whole[place] else self._bounds[first : first + width]
            for place, first in zip(own.tolist(), self._first_words[own].tolist(), strict=True)
        ]
        boxes = np.concatenate([*words, whole[:0]]).reshape(len(own), 2, len(shape))
        key = shape, boxes.tobytes()
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._examine(number, shape, own, boxes)
        return known

    def _examine(
        self, number: int, shape: tuple[int, ...], own: tables.Table, boxes: grid.BoxArray
    ) -> tuple[int, tuple[int, ...], tables.Table]:
        if not len(own) and not all(shape):
            return tables.REGULAR, shape * 2, np.empty(0, np.int64)
        found = grid.find_grid(shape, boxes) if len(own) else None
        if found is not None:
            return tables.REGULAR, shape + found[0].chunk_shape, found[1]
        defect = grid.find_cover_defect(shape, boxes)
        if defect is not None:
            raise self._uncovered(number, shape, own, defect)
        irregular, order = grid.IrregularBoxes.sort(boxes, len(shape))
        return tables.IRREGULAR, shape + tuple(irregular.to_words().tolist()), order

    def _uncovered(
        self, number: int, shape: tuple[int, ...], own: tables.Table, defect: grid.CoverDefect
    ) -> InvalidInput:
        places = own[list(defect.positions)]
        processes = sorted({int(process) for process in self._files["process"][self._chunks["file"][places]]})
        begin, extent = defect.box
        where = ", ".join(f"{at}:{at + length}" for at, length in zip(begin, extent, strict=True))
        what = {
            "hole": "is written by no process",
            "overlap": f"is written more than once, by processes {processes}",
            "outside": f"lies outside of it, yet process {processes} writes it",
        }[defect.kind]
        return InvalidInput(
            f"the part [{where}] of an array of shape {shape} {what}; all processes must save the same "
            "arrays with the same shardings",
            array=self._labels[number],
        )
