"""The files of an export as they are written: safetensors by pieces of arrays, or npz.

`safetensors/destination.py` says how they come to stand under their names.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Protocol, Self

import numpy as np

from waystation import _native
from waystation._errors import from_os_error
from waystation.safetensors.destination import Format

_HEADER_ALIGN_BYTES = 4096
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same arrays make the same file, whenever they are exported


@dataclass(frozen=True, slots=True)
class ExportedArray:
    """One array as it is written.

    Attributes:
        array: Its number in the checkpoint.
        label: Its name in the file.
        shape: Its shape in the file.
        dtype: Of the elements that are written.
        storage_dtype: safetensors' name for that.
    """

    array: int
    label: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    storage_dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def item_bytes(self) -> int:
        """Bytes of one of them."""
        return int(self.dtype.itemsize)


class FileWriter(Protocol):
    """Writes arrays one after another, each in pieces in C order; durable once the block is left."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def write(self, entry: ExportedArray, values: np.ndarray[Any, Any]) -> None:
        """Appends a piece of an array."""


def open_writer(path: str, file_format: Format, arrays: Sequence[ExportedArray]) -> FileWriter:
    """Creates a file for the given arrays, which are then written in this order."""
    return _SafetensorsWriter(path, arrays) if file_format == "safetensors" else _NpzWriter(path)


class _Writer:
    """A new file, whose failures are typed errors."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[bytes]

    def __enter__(self) -> Self:
        with self._typed_errors():
            self._file = open(self._path, "xb")
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._typed_errors(), self._file:
            if kind is not None:
                self._abandon()
                return
            self._end()
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise from_os_error(error, "write", self._path) from error

    def _begin(self) -> None:
        """Writes what comes before the first array."""

    def _end(self) -> None:
        """Writes what comes after the last array."""

    def _abandon(self) -> None:
        """Lets go of a file that will be removed."""


class _SafetensorsWriter(_Writer):
    def __init__(self, path: str, arrays: Sequence[ExportedArray]) -> None:
        super().__init__(path)
        self._tensors = [(entry.label, entry.storage_dtype, entry.shape) for entry in arrays]

    def _begin(self) -> None:
        # Loaders of Hugging Face want to be told a framework, and take 'pt' for 'any'.
        header = _native.build_safetensors_header(self._tensors, {"format": "pt"}, _HEADER_ALIGN_BYTES)
        self._file.write(header)

    def write(self, entry: ExportedArray, values: np.ndarray[Any, Any]) -> None:
        with self._typed_errors():
            self._file.write(_bytes_of(values))


class _NpzWriter(_Writer):
    def _begin(self) -> None:
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._member: IO[bytes] | None = None
        self._current: ExportedArray | None = None

    def write(self, entry: ExportedArray, values: np.ndarray[Any, Any]) -> None:
        with self._typed_errors():
            if entry is not self._current or self._member is None:
                self._member = self._next_member(entry)
            self._member.write(_bytes_of(values))

    def _next_member(self, entry: ExportedArray) -> IO[bytes]:
        if self._member is not None:
            self._member.close()
        self._current = entry
        info = zipfile.ZipInfo(f"{entry.label}.npy", _ZIP_TIME)
        member = self._archive.open(info, "w", force_zip64=True)
        description = {
            "descr": np.lib.format.dtype_to_descr(entry.dtype),
            "fortran_order": False,
            "shape": entry.shape,
        }
        np.lib.format.write_array_header_2_0(member, description)
        return member

    def _end(self) -> None:
        if self._member is not None:
            self._member.close()
        self._archive.close()

    def _abandon(self) -> None:
        for part in (self._member, self._archive):
            if part is not None:
                with contextlib.suppress(OSError, ValueError):
                    part.close()


def _bytes_of(values: np.ndarray[Any, Any]) -> memoryview:
    # Through uint8: NumPy lends no buffer of dtypes that the buffer protocol has no letter for.
    return memoryview(values.reshape(-1).view(np.uint8)) if values.nbytes else memoryview(b"")
