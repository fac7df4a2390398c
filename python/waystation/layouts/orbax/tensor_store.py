"""TensorStore, and nothing else of Waystation imports it: reads what this package does not read itself.

That is arrays whose chunks are compressed by other codecs than zstd, or laid out in other ways. Boxes are
read straight to memory that the caller gives, many at a time; it does not tell how many bytes that took.
Invariant: no more than a bound of bytes is on its way at a time, or one box.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from waystation import storage
from waystation._errors import Cancelled, Corrupt, Unsupported
from waystation._extras import install_command
from waystation.grid import Box, slices_of_box

# As Orbax has them: files read at a time, and bytes of OCDBT's nodes that are kept.
_FILES_AT_ONCE = 128
_CACHED_BYTES = 100_000_000
_MOST_IN_FLIGHT = 4096  # boxes


class BoxRead(NamedTuple):
    """A box of an array, and where it goes.

    Attributes:
        name: Of the array.
        box: In elements of it as it is stored.
        buffer: Memory of that shape and of the dtype in which it is stored.
    """

    name: str
    box: Box
    buffer: np.ndarray[Any, Any]


class StoreJob:
    """A read through TensorStore, as those who watch jobs of the engine know them.

    Args:
        nbytes: What is to be read.
    """

    def __init__(self, nbytes: int) -> None:
        self._total = nbytes
        self._done = 0
        self._is_cancelled = False

    def progress(self) -> tuple[int, int]:
        """Bytes that have been read, and that are to be read."""
        return self._done, self._total

    def cancel(self) -> None:
        """Lets it stop soon."""
        self._is_cancelled = True

    def add(self, nbytes: int) -> None:
        """Counts what has been read.

        Raises:
            Cancelled: It is to stop.
        """
        self._done += nbytes
        if self._is_cancelled:
            raise Cancelled("loading was cancelled")


class TensorStore:
    """The arrays of one checkpointable, through TensorStore.

    Args:
        directory: Of the checkpointable.
        is_ocdbt: Whether it holds an OCDBT database, else a file for every key.
        version: Of zarr.
        absent_is_damage: Whether a chunk that is not there is missing, or stands for the fill value.
        root: The open directory of the checkpoint, beneath which files are opened; without it, they are by
            their paths.

    Raises:
        Unsupported: TensorStore is not installed, or a symbolic link leads out of the checkpoint.
    """

    def __init__(
        self,
        directory: str,
        *,
        is_ocdbt: bool,
        version: int,
        absent_is_damage: bool,
        root: storage.Root | None = None,
    ) -> None:
        self._library = _imported(directory)
        self._directory = directory
        self._place = directory if root is None else self._hold(root)
        self._is_ocdbt = is_ocdbt
        self._driver = "zarr3" if version == 3 else "zarr"
        self._absent_is_damage = absent_is_damage
        self._arrays: dict[str, Any] = {}  # futures
        limits: dict[str, Any] = {"file_io_concurrency": {"limit": _FILES_AT_ONCE}}
        if is_ocdbt:
            limits["cache_pool#ocdbt"] = {"total_bytes_limit": _CACHED_BYTES}
        self._context = self._library.Context(limits)

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of keys, None for one that is not there."""
        try:
            store = self._library.KvStore.open(self._keys(""), context=self._context).result()
            reads = [store.read(key) for key in keys]
            found = [read.result() for read in reads]
        except ValueError as error:
            raise self._corrupt(error) from error
        return [bytes(read.value) if read.state == "value" else None for read in found]

    def read(self, reads: Sequence[BoxRead], limit_bytes: int, job: StoreJob) -> None:
        """Reads boxes.

        Args:
            reads: The boxes.
            limit_bytes: The bound on what is on its way.
            job: Told how far it is.

        Raises:
            Corrupt: Something is missing or damaged.
            Cancelled: The job was cancelled.
        """
        for read in reads:
            if read.name not in self._arrays:
                self._arrays[read.name] = self._open(read.name)
        pending: deque[tuple[BoxRead, Any]] = deque()
        held = 0
        try:
            for read in reads:
                while pending and (
                    held + read.buffer.nbytes > limit_bytes or len(pending) == _MOST_IN_FLIGHT
                ):
                    held -= self._finish(*pending.popleft(), job)
                pending.append((read, self._start(read)))
                held += read.buffer.nbytes
            while pending:
                self._finish(*pending.popleft(), job)
        finally:
            for _, future in pending:  # nothing may write to the caller's memory any more
                future.exception()

    def _start(self, read: BoxRead) -> Any:
        try:
            source = self._arrays[read.name].result()
            target = self._library.array(read.buffer, copy=False)
            selected = source[slices_of_box(read.box)] if read.box[0] else source
            return target.write(selected[self._library.d[:].translate_to[0]] if read.box[0] else selected)
        except ValueError as error:
            raise self._corrupt(error, read.name) from error

    def _finish(self, read: BoxRead, future: Any, job: StoreJob) -> int:
        try:
            future.result()
        except ValueError as error:
            raise self._corrupt(error, read.name) from error
        job.add(read.buffer.nbytes)
        return read.buffer.nbytes

    def _open(self, name: str) -> Any:
        """Starts opening an array."""
        specification = {
            "driver": self._driver,
            "kvstore": self._keys(name),
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": not self._absent_is_damage,
        }
        return self._library.open(specification, open=True, read=True, context=self._context)

    def _keys(self, name: str) -> dict[str, Any]:
        """The specification of the keys that begin with a name."""
        if not self._is_ocdbt:
            return {"driver": "file", "path": f"{self._place}/{name}"}
        base = {"driver": "file", "path": f"{self._place}/"}
        specification = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#ocdbt"}
        return {**specification, "path": name} if name else specification

    def _corrupt(self, error: ValueError, name: str | None = None) -> Corrupt:
        reason = _first_line(error).replace(self._place, self._directory)
        return Corrupt(f"'{self._directory}' cannot be read: {reason}", path=self._directory, array=name)

    def _hold(self, root: storage.Root) -> str:
        """A path that leads to the directory as long as this holds it open, whatever has its own path."""
        storage.check_links(self._directory, root)
        held = contextlib.ExitStack()
        weakref.finalize(self, held.close)
        descriptor = held.enter_context(root.opened(self._directory)).descriptor
        place = f"/proc/self/fd/{descriptor}"
        return place if descriptor is not None and storage.is_directory(place) else self._directory


def _imported(directory: str) -> Any:
    try:
        return importlib.import_module("tensorstore")
    except ImportError as error:
        raise Unsupported(
            f"'{directory}' is stored in a way that needs TensorStore, which is not installed: "
            f"{install_command('orbax')}",
            path=directory,
        ) from error


def _first_line(error: ValueError) -> str:
    return str(error).split("\n", 1)[0][:500]
