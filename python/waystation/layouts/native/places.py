"""Where chunks lie: from the array and number of each to its data file and offset.

A whole plan asks at once, so that tables that are read page by page are read in few calls: one for the heads
of all arrays in runs, one for their runs, one for chunk entries, one for the files.

Invariants: every place that is returned lies inside the data of its file, and has the length that the shape
of the chunk calls for, whether or not the tables were checked as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from waystation import grid
from waystation._distinct import distinct
from waystation._errors import Corrupt
from waystation.layouts.native import tables
from waystation.layouts.native.paged import PagedSection

Integers = npt.NDArray[np.int64]

_GROUP_WORDS = grid.GROUP_RUNS * grid.RUN_WORDS


def find_places(
    decoded: tables.Tables, arrays: Integers, numbers: Integers, lengths: Integers
) -> tuple[Integers, Integers]:
    """File and offset of each chunk, given by its array, its number there and its bytes.

    Raises:
        Corrupt: The tables contradict each other or the shapes.
    """
    entries = decoded.arrays[arrays]
    files, offsets = np.empty(len(arrays), np.int64), np.empty(len(arrays), np.int64)
    is_in_run = entries["kind"] == tables.RUNS
    listed, in_runs = np.flatnonzero(~is_in_run), np.flatnonzero(is_in_run)
    if len(listed):
        found = decoded.chunks[entries["first_chunk"][listed].astype(np.int64) + numbers[listed]]
        is_beyond = numbers[listed] >= entries["chunk_count"][listed].astype(np.int64)
        wrong = np.flatnonzero(is_beyond | (found["length"] != lengths[listed].astype(np.uint64)))
        if len(wrong):
            first = listed[wrong[0]]
            raise Corrupt(
                f"chunk {numbers[first]} of array {arrays[first]} has a length that does not fit its shape"
            )
        files[listed], offsets[listed] = found["file"], found["offset"]
    if len(in_runs):
        files[in_runs], offsets[in_runs] = _follow_runs(decoded, arrays[in_runs], numbers[in_runs])
    begins, ends = _bounds(decoded, files)
    offsets[in_runs] += begins[in_runs]  # those of runs count from the first byte of data
    _check_inside(files, offsets, lengths, begins, ends)
    return files, offsets


def check_inside(decoded: tables.Tables, files: Integers, offsets: Integers, lengths: Integers) -> None:
    """Refuses places that are not inside the data of their file."""
    _check_inside(files, offsets, lengths, *_bounds(decoded, files))


def _bounds(decoded: tables.Tables, files: Integers) -> tuple[Integers, Integers]:
    """Where the data of each of these files begin and end."""
    used, own = np.unique(files, return_inverse=True)
    if len(used) and not 0 <= used[0] <= used[-1] < len(decoded.files):
        raise Corrupt(f"a chunk names a file that is not among the {len(decoded.files)} of the file table")
    rows = decoded.files[used]
    return rows["data_start"].astype(np.int64)[own], rows["file_bytes"].astype(np.int64)[own]


def _check_inside(
    files: Integers, offsets: Integers, lengths: Integers, begins: Integers, ends: Integers
) -> None:
    wrong = np.flatnonzero((offsets < begins) | (offsets > ends - lengths))
    if len(wrong):
        first = wrong[0]
        raise Corrupt(f"a chunk at {offsets[first]} of data file {files[first]} lies outside of it")


@dataclass(slots=True)
class _Heads:
    """Where the words of arrays in runs are: the first chunks of their groups of runs, and the runs."""

    firsts: Integers
    runs: Integers
    ends: Integers

    @classmethod
    def of(cls, decoded: tables.Tables, arrays: Integers) -> _Heads:
        entries = decoded.arrays[arrays]
        begins = (entries["first_dim"] + 2 * entries["ndim"].astype(np.uint64)).astype(np.int64)
        ends = (entries["first_dim"] + entries["dim_count"]).astype(np.int64)
        counts = decoded.dims[begins].astype(np.int64)
        groups = -(-counts // grid.GROUP_RUNS)
        runs = begins + 1 + groups
        wrong = (counts < 1) | (counts > ends) | (runs + counts * grid.RUN_WORDS != ends)
        if wrong.any():
            array = int(arrays[np.argmax(wrong)])
            raise Corrupt(f"the number of runs of array {array} does not fit its extents")
        return cls(begins + 1, runs, ends)


def _follow_runs(decoded: tables.Tables, arrays: Integers, numbers: Integers) -> tuple[Integers, Integers]:
    owners, own = np.unique(arrays, return_inverse=True)
    heads = _Heads.of(decoded, owners)
    prefetch(decoded.dims, heads.firsts, heads.runs)
    order = np.argsort(own, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(own))[:-1])
    wanted = [_words_of_groups(decoded, heads, place, numbers[asked]) for place, asked in enumerate(members)]
    every = np.concatenate(wanted)
    prefetch(decoded.dims, every, every + 1)
    files, offsets = np.empty(len(arrays), np.int64), np.empty(len(arrays), np.int64)
    for asked, words in zip(members, wanted, strict=True):
        runs = decoded.dims[words].astype(np.int64).reshape(-1, grid.RUN_WORDS)
        files[asked], offsets[asked] = grid.places_in_runs(runs, numbers[asked])
    return files, offsets


def _words_of_groups(decoded: tables.Tables, heads: _Heads, place: int, numbers: Integers) -> Integers:
    """The words of the groups of runs in which chunks of an array are."""
    firsts = decoded.dims[int(heads.firsts[place]) : int(heads.runs[place])].astype(np.int64)
    groups = distinct(np.maximum(np.searchsorted(firsts, numbers, side="right") - 1, 0))
    words: Integers = (
        heads.runs[place] + groups[:, None] * _GROUP_WORDS + np.arange(_GROUP_WORDS, dtype=np.int64)
    ).ravel()
    inside: Integers = words[words < heads.ends[place]]
    return inside


def prefetch(section: tables.Entries, begins: Integers, ends: Integers) -> None:
    """Reads ranges of a section in one call, where it is read page by page."""
    if isinstance(section, PagedSection):
        section.prefetch(begins, ends)


def arrays_at(decoded: tables.Tables, file: int, begin: int, end: int) -> list[int]:
    """The arrays that have bytes in a range of a data file."""
    arrays, chunks = decoded.arrays, decoded.chunks
    starts = chunks["offset"].astype(np.int64)
    ends = starts + chunks["length"].astype(np.int64)
    listed = np.flatnonzero((chunks["file"] == file) & (starts < end) & (ends > begin))
    owners = np.searchsorted(arrays["first_chunk"], listed.astype(np.uint64), side="right") - 1
    in_runs = [
        number
        for number in np.flatnonzero(arrays["kind"] == tables.RUNS).tolist()
        if _runs_have_bytes(decoded, number, file, begin, end)
    ]
    return sorted({*owners.tolist(), *in_runs})


def _runs_have_bytes(decoded: tables.Tables, array: int, file: int, begin: int, end: int) -> bool:
    """Whether an array in runs has bytes in a range of a data file."""
    heads = _Heads.of(decoded, np.array([array]))
    words = decoded.dims[int(heads.runs[0]) : int(heads.ends[0])].astype(np.int64)
    firsts, files, file_strides, offsets, offset_strides = words.reshape(-1, grid.RUN_WORDS).T
    data_start = int(decoded.files[file]["data_start"])
    begin, end = begin - data_start, end - data_start
    chunks = grid.ChunkGrid(decoded.array_shape(array), decoded.chunk_shape(array))
    # A run that goes from file to file has one chunk at most in this one. In a run that stays in a file the
    # chunks follow each other: if the last that begins before the end is not in the range, none is.
    moves = file_strides > 0
    way = np.where(moves, file - files, end - 1 - offsets)
    steps = way // np.maximum(np.where(moves, file_strides, offset_strides), 1)
    steps = np.clip(steps, 0, np.diff(firsts, append=chunks.chunk_count) - 1)
    starts = offsets + steps * offset_strides
    lengths = chunks.volumes(firsts + steps) * int(decoded.arrays["item_bits"][array]) // 8
    hit = (files + steps * file_strides == file) & (starts < end) & (starts + lengths > begin)
    return bool(hit.any())
