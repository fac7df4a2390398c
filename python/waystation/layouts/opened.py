"""What a load needs of a state that has been opened, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from waystation._options import Options
from waystation.frameworks.storage import StorageMetadata
from waystation.layouts.native.read import Allocate, Request
from waystation.layouts.native.read_job import ReadStatistics
from waystation.layouts.native.tree_file import TreeFile


class Opened(Protocol):
    """A state whose metadata have been read and checked."""

    @property
    def directory(self) -> str:
        """Where its files are."""
        ...

    @property
    def notices_absence(self) -> bool:
        """Whether a read fails where a file is missing that belongs to it; else it may stand for a value."""
        ...

    @property
    def tree(self) -> TreeFile:
        """Its structure, its leaves and what is known of its arrays."""
        ...

    def storage_metadata(self, number: int) -> StorageMetadata:
        """How one of its arrays is cut."""
        ...

    def read_boxes(
        self,
        requests: Sequence[Request],
        options: Options,
        on_job: Callable[[Any], None],
        statistics: ReadStatistics,
        allocate: Allocate,
    ) -> list[list[np.ndarray[Any, Any]]]:
        """Reads every requested box, as it is stored, into memory of its own.

        Layouts whose data the engine can bring to devices by itself have a method `read_to_devices` as well,
        which takes `layouts.native.destinations.Destinations` instead of `allocate`.

        Args:
            requests: What is to be read.
            options: How.
            on_job: Told of every job: something with `progress` and `cancel`, as `_native.Job` has them.
            statistics: Where what was read is added.
            allocate: Gives the memory.

        Returns:
            For each request an array per box, C-contiguous, of the stored dtype (dtypes without a NumPy equal
            keep their storage form, with the trailing axis).
        """
        ...
