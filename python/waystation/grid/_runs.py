"""Runs: the places of consecutive chunks that follow a pattern, in five numbers for all of them.

A run is `(first chunk, file, stride of files, offset, stride of offsets)`: its k-th chunk is in data file
`file + k * stride` at `offset + k * stride`. It ends where the next one begins. When every process writes its
chunk of an array at the same place of its own file, one run says where all of them are.

Offsets may count from wherever suits: tables count them from the first byte of data of each file, because the
lengths of headers follow no pattern.

Invariants: runs are sorted by first chunk, from 0 on; strides are not negative. Their words, as a chunk table
has them (kind 2, after the two shapes), are their number, the first chunk of each group of 64, then the runs;
so a reader looks at the first chunks and then only into the groups that it needs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GROUP_RUNS = 64
RUN_WORDS = 5


def find_runs(
    files: NDArray[np.int64], offsets: NDArray[np.int64], most_runs: int
) -> NDArray[np.int64] | None:
    """Runs that place chunks, which are given in order, each as long as its first step allows; None if they
    are more than `most_runs`."""
    count = len(files)
    file_steps, offset_steps = np.diff(files), np.diff(offsets)
    changes = (file_steps[1:] != file_steps[:-1]) | (offset_steps[1:] != offset_steps[:-1])
    # A run ends with a series of equal steps and leaves out the step to the next: two series at most.
    ends = [*(np.flatnonzero(changes) + 1).tolist(), count - 1]
    if len(ends) > 2 * most_runs:
        return None
    is_forward = (file_steps >= 0) & (offset_steps >= 0)
    rows: list[tuple[int, int, int, int, int]] = []
    begin = series = 0
    while begin < count:
        if len(rows) == most_runs:
            return None
        strides, last = (0, 0), begin
        if begin < count - 1 and is_forward[begin]:
            while ends[series] <= begin:
                series += 1
            strides, last = (int(file_steps[begin]), int(offset_steps[begin])), ends[series]
        rows.append((begin, int(files[begin]), strides[0], int(offsets[begin]), strides[1]))
        begin = last + 1
    return np.array(rows, np.int64)


def words_of_runs(runs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """As they stand in a table."""
    head = [np.array([len(runs)], np.int64), runs[::GROUP_RUNS, 0], runs.ravel()]
    return np.concatenate(head).astype("<u8")


def places_in_runs(
    runs: NDArray[np.int64], numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Files and offsets of chunks; the run of each is among those given."""
    own = runs[np.maximum(np.searchsorted(runs[:, 0], numbers, side="right") - 1, 0)]
    steps = numbers - own[:, 0]
    return own[:, 1] + steps * own[:, 2], own[:, 3] + steps * own[:, 4]
