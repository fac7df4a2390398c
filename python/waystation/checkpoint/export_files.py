"""The files of an export as they are written: safetensors by pieces of arrays, or npz.

`safetensors/destination.py` says how they come to stand under their names.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np

from waystation import _native, storage
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
    """Writes arrays one after another, each in pieces in C order."""

    def write(self, entry: ExportedArray, values: np.ndarray[Any, Any]) -> None:
        """Appends a piece of an array."""
        ...


@contextlib.contextmanager
def open_writer(path: str, file_format: Format, arrays: Sequence[ExportedArray]) -> Iterator[FileWriter]:
    """Creates a file for the given arrays, which are then written in this order; durable once the block is
    left."""
    with storage.of(path).new_file(path) as file:
        typed_errors = functools.partial(_typed_errors, path)
        if file_format == "safetensors":
            with typed_errors():
                writer = _SafetensorsWriter(file, typed_errors, arrays)
            yield writer
            return
        archive = _NpzWriter(file, typed_errors)
        try:
            yield archive
            with typed_errors():
                archive.end()
        except BaseException:
            archive.abandon()
            raise


@contextlib.contextmanager
def _typed_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, "write", path) from error


TypedErrors = Callable[[], AbstractContextManager[None]]


class _SafetensorsWriter:
    def __init__(self, file: IO[bytes], typed_errors: TypedErrors, arrays: Sequence[ExportedArray]) -> None:
        self._file = file
        self._typed_errors = typed_errors
        tensors = [(entry.label, entry.storage_dtype, entry.shape) for entry in arrays]
        # Loaders of Hugging Face want to be told a framework, and take 'pt' for 'any'.
        file.write(_native.build_safetensors_header(tensors, {"format": "pt"}, _HEADER_ALIGN_BYTES))

    def write(self, entry: ExportedArray, values: np.ndarray[Any, Any]) -> None:
        with self._typed_errors():
            self._file.write(_bytes_of(values))


class _NpzWriter:
    def __init__(self, file: IO[bytes], typed_errors: TypedErrors) -> None:
        self._typed_errors = typed_errors
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
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

    def end(self) -> None:
        """Writes what comes after the last array."""
        if self._member is not None:
            self._member.close()
        self._archive.close()

    def abandon(self) -> None:
        """Lets go of a file that will be removed."""
        for part in (self._member, self._archive):
            if part is not None:
                with contextlib.suppress(OSError, ValueError):
                    part.close()


def _bytes_of(values: np.ndarray[Any, Any]) -> memoryview:
    # Through uint8: NumPy lends no buffer of dtypes that the buffer protocol has no letter for.
    return memoryview(values.reshape(-1).view(np.uint8)) if values.nbytes else memoryview(b"")
