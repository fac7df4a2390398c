"""What each process says of the chunks that it has written, and the proof that together they are the arrays.

Invariant: a part is only ever read by the save that wrote it, so its encoding has no version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from waystation._errors import InvalidInput
from waystation.layouts.orbax.checksums import SummedFile
from waystation.layouts.orbax.write_ocdbt import DataFile
from waystation.layouts.orbax.write_plan import Arrays, Value

_COLUMNS = 5
ARRAY, NUMBER, FILE, OFFSET, LENGTH = range(_COLUMNS)


@dataclass(slots=True)
class Part:
    """What one process has written of a state.

    Attributes:
        data_files: Of OCDBT.
        rows: For each chunk its array, its number there, and the file, offset and length of its value.
        files: The files that it has written, with their checksums.
    """

    data_files: Sequence[DataFile]
    rows: NDArray[np.int64]
    files: Sequence[SummedFile]

    @classmethod
    def of(
        cls,
        values: Sequence[Value],
        data_files: Sequence[DataFile],
        places: NDArray[np.int64],
        files: Sequence[SummedFile],
    ) -> Part:
        """Of values and where they are, and the files that these are in."""
        rows = np.empty((len(values), _COLUMNS), np.int64)
        rows[:, ARRAY] = [value.chunk.array for value in values]
        rows[:, NUMBER] = [value.number for value in values]
        rows[:, FILE:] = places
        return cls(data_files, rows, files)

    def encode(self) -> bytes:
        """As bytes."""
        files = [(file.name, file.nbytes, len(file.blocks)) for file in self.files]
        head = json.dumps([self.data_files, files, self.rows.nbytes]).encode()
        return b"".join([head, b"\n", self.rows.tobytes(), *(file.blocks for file in self.files)])

    @classmethod
    def decode(cls, data: bytes) -> Part:
        """Reads what `encode` made."""
        head, _, rest = data.partition(b"\n")
        data_files, written, at = json.loads(head)
        rows = np.frombuffer(rest[:at], np.int64).reshape(-1, _COLUMNS)
        files = []
        for name, nbytes, sum_bytes in written:
            files.append(SummedFile(name, nbytes, rest[at : at + sum_bytes]))
            at += sum_bytes
        return cls([DataFile(*file) for file in data_files], rows, files)


def check_complete(parts: Sequence[Part], arrays: Arrays) -> None:
    """Makes sure that every chunk of every array has been written once.

    Raises:
        InvalidInput: One has not, or twice.
    """
    rows = np.concatenate([part.rows for part in parts])
    counts = np.array([found.grid.chunk_count for found in arrays.cuts], np.int64)
    begins = np.cumsum(counts) - counts
    written = np.bincount(begins[rows[:, ARRAY]] + rows[:, NUMBER], minlength=int(counts.sum()))
    wrong = np.flatnonzero(written != 1)
    if len(wrong):
        chunk = int(wrong[0])
        array = int(np.searchsorted(begins + counts, chunk, side="right"))
        times = "by no process" if written[chunk] == 0 else "more than once"
        raise InvalidInput(
            f"chunk {chunk - int(begins[array])} of an array of shape {arrays.sources[array].shape} was "
            f"written {times}; all processes must save the same arrays with the same shardings and options",
            array=arrays.names[array],
        )
