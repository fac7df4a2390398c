"""A read of tensors that is under way: its jobs, and which tensors have arrived.

Invariants: a tensor is said to have arrived only after its file was found, later than its bytes were read, to
be what it was when its header was checked; once `finish` or `close` has returned, in whatever way, no memory
is used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from waystation._distinct import distinct
from waystation._errors import Conflict, Corrupt, NotFound, WaystationError
from waystation.layouts.native import read_job
from waystation.layouts.opened import ReadStatistics
from waystation.safetensors.headers import Header, check_unchanged


@dataclass(slots=True)
class ReadJob:
    """A job of the engine, and what it reads.

    Attributes:
        job: The job.
        headers: Of the files that it reads.
        files: The place among these of each of its records.
        tensors: The tensor of each of its records.
        arrived: How many of the first records have arrived, of files that were the same afterwards.
    """

    job: Any
    headers: Sequence[Header]
    files: NDArray[np.int64]
    tensors: NDArray[np.int64]
    arrived: int = 0


class Arriving:
    """What is being read.

    Args:
        nbytes: What all of it has.
        statistics: Where what was read is added in the end.
        named: Adds to an error which tensor it is about.
    """

    def __init__(
        self,
        nbytes: int,
        statistics: ReadStatistics,
        named: Callable[[WaystationError], WaystationError],
    ) -> None:
        self._nbytes = nbytes
        self._statistics = statistics
        self._named = named
        self._jobs: list[ReadJob] = []
        self._last: list[dict[int, int]] | None = None  # of each job: how many records each tensor waits for

    def add(self, job: ReadJob) -> None:
        """Takes a job that was started."""
        self._jobs.append(job)

    def wait_for(self, tensors: Iterable[int]) -> None:
        """Returns once all that was asked for of some tensors is in its place. The jobs must announce it.

        Raises:
            Conflict, Corrupt: As `finish`.
        """
        if self._last is None:
            self._last = [
                {tensor: place + 1 for place, tensor in enumerate(own.tensors.tolist())} for own in self._jobs
            ]
        for tensor in tensors:
            for own, last in zip(self._jobs, self._last, strict=True):
                if last.get(tensor, 0) > own.arrived:
                    self._wait(own, last[tensor])

    def _wait(self, own: ReadJob, records: int) -> None:
        own.job.wait_arrived(records)
        arrived = own.job.arrived()
        if arrived < records:
            self.finish()  # raises what has ended the job
        files = distinct(own.files[own.arrived : arrived])
        try:
            check_unchanged(own.headers[file] for file in files.tolist())
        except Conflict:
            self.close()
            raise
        own.arrived = arrived

    def wait(self) -> None:
        """Returns once nothing is read any more, however that ended. Another thread may wait for tensors."""
        for own in self._jobs:
            own.job.wait()

    def finish(self) -> None:
        """Waits for all of it.

        Raises:
            Conflict: A file changed.
            Corrupt: A file is damaged.
        """
        try:
            for own in self._jobs:
                read_job.finish(own.job, self._statistics)
        except BaseException as error:
            self.fail(error)
        check_unchanged(header for own in self._jobs for header in own.headers)
        self._statistics.bytes_needed += self._nbytes

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all jobs and raises the error, or one that says better what has happened."""
        self.close()
        if isinstance(error, Conflict | Corrupt | NotFound):
            for header in [header for own in self._jobs for header in own.headers]:
                if not header.is_tagged or header.path == error.context.get("path"):
                    header.check_unchanged()
            raise self._named(error)
        raise error

    def close(self) -> None:
        """Ends what is still being read."""
        read_job.stop([own.job for own in self._jobs])
