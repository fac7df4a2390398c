"""The files of an export: their names, how they are written, and how they come to stand under their names.

Everything is written into a hidden directory beside its place and made durable; then it moves. A directory
that did not exist appears whole, in one act. Failure sequence: killed while writing, the hidden directory is
left and the destination is as it was; killed while files move into a directory that was there before, that
holds no index, neither the old nor the new, so that no reader takes a mixture for a model. The name of the
hidden directory says which process it is of, so that `collect` can remove what a dead one left.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, Protocol, Self

import numpy as np

from waystation import _native
from waystation._errors import Conflict, InvalidInput, Unsupported, from_os_error
from waystation.checkpoint.paths import is_checkpoint
from waystation.layouts.native import names
from waystation.layouts.native.attempts import new_attempt_id, remove_tree

Format = Literal["safetensors", "npz"]

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


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to be written, and what is in it, in order."""

    name: str
    arrays: list[ExportedArray]


# ---- where -------------------------------------------------------------------------------------


class Destination:
    """Where an export goes, by the path that a user gave.

    Attributes:
        format: What is written.
        directory: Where the files will be.
        stem: What their names begin with.

    Raises (on creation):
        InvalidInput: The path cannot be written to, or does not fit the format.
        Conflict: An export is there already.
    """

    def __init__(self, output: str, file_format: Format | None, *, overwrite: bool) -> None:
        absolute = os.path.abspath(os.path.expanduser(output))
        suffix = os.path.splitext(absolute)[1]
        self.format: Format = file_format or ("npz" if suffix == ".npz" else "safetensors")
        if self.format == "npz" and suffix != ".npz":
            raise InvalidInput(f"'{output}' does not end in .npz; NumPy would not find it", path=absolute)
        if self.format == "safetensors" and suffix == ".npz":
            raise InvalidInput(f"'{output}' ends in .npz, but safetensors is asked for", path=absolute)
        if suffix == f".{self.format}" and not os.path.isdir(absolute):
            self.directory, name = os.path.split(absolute)
            self.stem = os.path.splitext(name)[0]
        else:
            self.directory, self.stem = absolute, "model"
        self._overwrite = overwrite
        self._check()

    def _check(self) -> None:
        if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
            raise InvalidInput(f"'{self.directory}' is not a directory", path=self.directory)
        if is_checkpoint(self.directory) or is_checkpoint(os.path.dirname(self.directory)):
            raise InvalidInput(
                f"'{self.directory}' is (in) a checkpoint; export to elsewhere", path=self.directory
            )
        present = self._present()
        if present and not self._overwrite:
            raise Conflict(
                f"'{os.path.join(self.directory, present[0])}' exists already; overwrite it (--overwrite), "
                "or choose another place",
                path=self.directory,
            )

    def _present(self) -> list[str]:
        """Names of an earlier export of this name, the index first."""
        pattern = re.compile(rf"{re.escape(self.stem)}(-\d{{5}}-of-\d{{5}})?\.{self.format}")
        try:
            entries = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise from_os_error(error, "list", self.directory) from error
        index = [name for name in entries if name == self._index_name]
        return index + [name for name in entries if pattern.fullmatch(name)]

    @property
    def _index_name(self) -> str:
        return f"{self.stem}.safetensors.index.json"

    def plan(self, arrays: Sequence[ExportedArray], max_shard_bytes: int) -> list[PlannedFile]:
        """Deals the arrays out to files, in order, each file full before the next is begun."""
        if self.format == "npz":
            return [PlannedFile(f"{self.stem}.npz", list(arrays))]
        groups: list[list[ExportedArray]] = [[]]
        held = 0
        for entry in arrays:
            if groups[-1] and held + entry.nbytes > max_shard_bytes:
                groups.append([])
                held = 0
            groups[-1].append(entry)
            held += entry.nbytes
        return [
            PlannedFile(self._file_name(number, len(groups)), sorted(group, key=_alignment_rank))
            for number, group in enumerate(groups, 1)
        ]

    def _file_name(self, number: int, count: int) -> str:
        part = f"-{number:05}-of-{count:05}" if count > 1 else ""
        return f"{self.stem}{part}.safetensors"

    @contextmanager
    def staged(self) -> Iterator[str]:
        """Makes the hidden directory; what is in it at the end is removed."""
        exists = os.path.isdir(self.directory)
        parent = self.directory if exists else os.path.dirname(self.directory)
        stage = os.path.join(parent, names.export_stage(self.stem, new_attempt_id()))
        try:
            os.makedirs(stage)
        except OSError as error:
            raise from_os_error(error, "create", stage) from error
        try:
            yield stage
        finally:
            remove_tree(stage)

    def publish(self, stage: str, files: Sequence[PlannedFile]) -> list[str]:
        """Gives durable files their names; returns their paths, that of the index last."""
        file_names = [file.name for file in files]
        if len(files) > 1:
            _write_index(os.path.join(stage, self._index_name), files)
            file_names.append(self._index_name)
        _native.sync_paths([stage])
        if os.path.isdir(self.directory):
            self._move_into(stage, file_names)
        else:
            _rename_new(stage, self.directory)
            _native.sync_paths([os.path.dirname(self.directory)])
        return [os.path.join(self.directory, name) for name in file_names]

    def _move_into(self, stage: str, file_names: Sequence[str]) -> None:
        old = self._present() if self._overwrite else []
        try:
            for name in old:  # the index goes first
                if len(file_names) > 1 or name not in file_names:
                    os.unlink(os.path.join(self.directory, name))
            for name in file_names:
                source, target = os.path.join(stage, name), os.path.join(self.directory, name)
                if self._overwrite:
                    os.replace(source, target)
                else:
                    _rename_new(source, target)
        except OSError as error:
            raise from_os_error(error, "replace files in", self.directory) from error
        _native.sync_paths([self.directory])


def _rename_new(source: str, target: str) -> None:
    try:
        _native.rename_new(source, target)
    except Conflict as error:
        raise Conflict(f"'{target}' appeared during the export; it was left alone", path=target) from error
    except Unsupported:
        if os.path.lexists(target):
            raise Conflict(f"'{target}' appeared during the export; it was left alone", path=target) from None
        try:
            os.rename(source, target)
        except OSError as error:
            raise from_os_error(error, "rename to", target) from error


def _alignment_rank(entry: ExportedArray) -> int:
    """Arrays whose sizes keep the next one aligned come first, so that readers can map most of them."""
    if entry.nbytes == 0:
        return 4
    return next((rank for rank, step in enumerate((4096, 256, 64)) if entry.nbytes % step == 0), 3)


def _write_index(path: str, files: Sequence[PlannedFile]) -> None:
    """The index by which tools of Hugging Face find the file of each tensor."""
    entries = sorted((entry.label, file.name) for file in files for entry in file.arrays)
    total = sum(entry.nbytes for file in files for entry in file.arrays)
    content = {"metadata": {"total_size": total}, "weight_map": dict(entries)}
    _native.write_small_files([(path, json.dumps(content, indent=2).encode() + b"\n")])


# ---- how ---------------------------------------------------------------------------------------


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
