"""Jobs of the engine over files of a checkpointable, which are verified where there are checksums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waystation import _native, storage
from waystation._options import Options
from waystation.layouts.native import read_job
from waystation.layouts.opened import ReadStatistics
from waystation.layouts.orbax.checksums import FileChecksums
from waystation.layouts.orbax.values import Files


class Engine:
    """The jobs of one call.

    Args:
        options: How to read.
        on_job: Told of every job.
        statistics: Where what was read is added.
        checksums: What vouches for the files; None to verify nothing.
        root: The directory beneath which files are opened; without it, they are by their paths.

    Attributes:
        options: How to read.
    """

    def __init__(
        self,
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        checksums: FileChecksums | None,
        root: storage.Root | None = None,
    ) -> None:
        self.options = options
        self._checksums = checksums
        self._root = root
        self._on_job = on_job
        self._statistics = statistics

    @property
    def verifies_chunks(self) -> bool:
        """Whether the checksums that chunks have of their own are to be compared: nothing else vouches for
        them."""
        return self._checksums is None and self.options.array.loading.verify is not False

    def read(self, files: Files, words: NDArray[np.int64], owners: object) -> None:
        """Does what records of `_native.start_read` say.

        Raises:
            Corrupt: A file is not there any more, shorter than it was, or damaged.
        """
        job = self.start(files, words, owners)
        if job is not None:
            self.finish(job)

    def start(self, files: Files, words: NDArray[np.int64], owners: object) -> _native.Job | None:
        """The same in the background, until `finish`; None if there is nothing to do."""
        listed = files.listed(self._checksums)
        if not listed:
            return None
        job = read_job.start(listed, words, owners, self.options, root=self._root)
        self._on_job(job)
        return job

    def finish(self, job: _native.Job) -> None:
        """Waits for a job; on an error, too, it then uses no memory any more."""
        read_job.finish(job, self._statistics)
