"""An imagined training job of any number of processes: its arrays, and what each process says of its files.

A thousand arrays in a hundred layers. Of each ten, four are cut along one axis by all processes (as FSDP
cuts), two are cut by a mesh of two axes, one by the same mesh the other way round, and three are small,
replicated, and written whole by one process each, as replica-parallel saving shares them out. Every process
holds 700 chunks of 256 KiB, so the state grows with the job: 18 TB at 100,000 processes.

What a process says is made by formula, because planning the files of 100,000 processes one by one would take
minutes; `check` compares it, byte for byte, with what the real planner makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waystation import tree
from waystation.frameworks.base import ArraySource
from waystation.grid import Box
from waystation.layouts.native import tables, write_plan
from waystation.layouts.native.chunks import Chunk
from waystation.layouts.native.parts import Part
from waystation.layouts.opened import ArrayLeaf, StoredTree

Integers = npt.NDArray[np.int64]

LAYERS = 100
COLUMNS = 8  # of the mesh
ITEM_BYTES = 2
# The shape of a chunk, by how its array is cut. They differ, so that no box is one of another array too.
CHUNK_SHAPES = {"all": (32, 4096), "mesh": (64, 2048), "turned": (128, 1024)}
LAYER = ("all", "mesh", "small", "all", "mesh", "small", "all", "turned", "small", "all")
SMALL_SHAPES = ((4096,), (16384,), (64,))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What processes that own the same small arrays have in common."""

    process: int  # one of them
    recipe: bytes
    data_bytes: int
    header_bytes: int  # of that process, before it is filled up


class Job:
    """A job.

    Attributes:
        processes: Their number; a multiple of twice the columns of the mesh.
        sources: Its arrays.
        labels: Their key paths.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._cuts = [cut for _ in range(LAYERS) for cut in LAYER]
        small = iter(range(self._cuts.count("small")))
        self._shapes = [
            SMALL_SHAPES[next(small) % len(SMALL_SHAPES)] if cut == "small" else self._shape(cut)
            for cut in self._cuts
        ]
        self.sources = [_source(shape) for shape in self._shapes]
        self.labels = [f"layers.{array // 10}.{cut}{array % 10}" for array, cut in enumerate(self._cuts)]
        self._owned = self._share_small_arrays()
        self._kinds: dict[tuple[int, ...], _Kind] = {}

    @property
    def state_bytes(self) -> int:
        """Of all arrays."""
        return sum(math.prod(shape) * ITEM_BYTES for shape in self._shapes)

    def tree_file(self) -> StoredTree:
        """The structure of its state."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        _, structure = tree.flatten(numbers)
        leaves: list[ArrayLeaf] = [ArrayLeaf(number) for number in range(len(self.sources))]
        return StoredTree(structure, [*leaves], self.sources, self.labels)

    def parts(self) -> Iterator[Part]:
        """What each process says."""
        every = np.arange(self.processes)
        offsets = np.concatenate([self._offsets(cut, every) for cut in CHUNK_SHAPES], axis=1)
        digits = self._digits(every)
        for process in range(self.processes):
            kind = self._kind(process)
            header_bytes = kind.header_bytes + int(digits[process] - digits[kind.process])
            files = np.zeros(1, tables.FILE_ENTRY)
            files["process"] = process
            files["data_start"] = (
                -(-header_bytes // write_plan.HEADER_ALIGN_BYTES) * write_plan.HEADER_ALIGN_BYTES
            )
            files["file_bytes"] = files["data_start"] + kind.data_bytes
            blocks = -(-int(files["file_bytes"][0]) // tables.BLOCK_BYTES)
            checksums = np.arange(blocks, dtype=np.uint64) + np.uint64(process << 32)
            yield Part(files, kind.recipe, offsets[process], checksums)

    def check(self, processes: Sequence[int]) -> None:
        """Compares what some processes say with what the planner of writes makes of their chunks."""
        wanted = set(processes)
        for process, part in enumerate(self.parts()):
            if process in wanted:
                planned = self._planned(process)
                checksums = [part.checksums.tobytes()]
                expected = Part.of(planned, self._chunks(process), checksums).encode()
                if part.encode() != expected:
                    raise RuntimeError(f"process {process} of {self.processes} would say something else")

    def boxes(self, process: int, processes: int) -> list[Box]:
        """What a process needs of every array if so many processes load the state, on the same mesh."""
        scale = self.processes // processes
        found: list[Box] = []
        for cut, shape in zip(self._cuts, self._shapes, strict=True):
            if cut == "small":
                found.append(((0,) * len(shape), shape))
                continue
            rows, columns = CHUNK_SHAPES[cut]
            extents = (rows, columns * scale) if cut == "turned" else (rows * scale, columns)
            first = (
                process * scale
                if cut == "all"
                else (process // COLUMNS) * scale * COLUMNS + process % COLUMNS
            )
            begin = self._offsets(cut, np.array([first]))[0].tolist()
            found.append(((begin[0], begin[1]), extents))
        return found

    def _shape(self, cut: str) -> tuple[int, int]:
        rows, columns = CHUNK_SHAPES[cut]
        mesh_rows = self.processes // COLUMNS
        counts = {"all": (self.processes, 1), "mesh": (mesh_rows, COLUMNS), "turned": (COLUMNS, mesh_rows)}
        return rows * counts[cut][0], columns * counts[cut][1]

    def _offsets(self, cut: str, processes: Integers) -> Integers:
        """Where the chunks of processes begin."""
        row, column = np.divmod(processes, COLUMNS)
        places = {"all": (processes, 0 * processes), "mesh": (row, column), "turned": (column, row)}[cut]
        found: Integers = np.stack(places, axis=1) * np.array(CHUNK_SHAPES[cut])
        return found

    def _digits(self, processes: Integers) -> Integers:
        """How many digits the names of the tensors of processes have."""
        powers = 10 ** np.arange(1, 18)
        found = np.zeros(len(processes), np.int64)
        for cut, shape in CHUNK_SHAPES.items():
            begins = self._offsets(cut, processes)
            for bound in (begins, begins + np.array(shape)):
                digits = 1 + np.searchsorted(powers, bound, side="right")
                found += self._cuts.count(cut) * digits.sum(axis=1)
        return found

    def _share_small_arrays(self) -> dict[int, tuple[int, ...]]:
        """The small arrays that each owner writes: each goes to the process with the fewest bytes so far."""
        given = np.zeros(self.processes, np.int64)
        owned: dict[int, tuple[int, ...]] = {}
        for array, cut in enumerate(self._cuts):
            if cut == "small":
                owner = int(np.argmin(given))
                given[owner] += math.prod(self._shapes[array]) * ITEM_BYTES
                owned[owner] = (*owned.get(owner, ()), array)
        return owned

    def _kind(self, process: int) -> _Kind:
        own = self._owned.get(process, ())
        kind = self._kinds.get(own)
        if kind is None:
            planned = self._planned(process)
            part = Part.of(planned, self._chunks(process), [])
            (file,) = planned.files
            # The JSON of a header ends before the spaces that fill it up.
            kind = _Kind(process, part.recipe, planned.data_bytes, len(file.header.rstrip(b" ")))
            self._kinds[own] = kind
        return kind

    def _planned(self, process: int) -> write_plan.WritePlan:
        return write_plan.plan(self._chunks(process), self.sources, self.labels, 1 << 40, process)

    def _chunks(self, process: int) -> list[Chunk]:
        own = self._owned.get(process, ())
        found = []
        for array, cut in enumerate(self._cuts):
            if cut != "small":
                begin = tuple(self._offsets(cut, np.array([process]))[0].tolist())
                shape = CHUNK_SHAPES[cut]
                found.append(Chunk(array, begin, shape, math.prod(shape) * ITEM_BYTES, []))
            elif array in own:
                small = self._shapes[array]
                found.append(Chunk(array, None, small, math.prod(small) * ITEM_BYTES, []))
        return found


def _source(shape: tuple[int, ...]) -> ArraySource:
    return ArraySource(
        shape,
        "bfloat16",
        "jax",
        "BF16",
        shape,
        storage_item_bytes=ITEM_BYTES,
        blocks=[],
        mutable=False,
    )
