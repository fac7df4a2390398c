"""Tensors of any library, described by their addresses, as a safetensors file or its bytes.

Invariants: what is written is what the safetensors package writes (the order of the tensors, the header and
its padding), except that text for people keeps its order; a file appears whole and durable, or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from waystation import _native, _plans, storage
from waystation._errors import InvalidInput, WaystationError, WrongType
from waystation._options.in_effect import current_options
from waystation.compat.errors import Directory, NoSuchDtype, NotPositive, translated
from waystation.frameworks import dtypes
from waystation.layouts.native import engine_job
from waystation.safetensors.description import PACKED
from waystation.safetensors.sources import PathLike
from waystation.storage.attempts import new_attempt_id
from waystation.transfers.statistics import SaveStatistics, failures_published, tell

_HEADER_ALIGN_BYTES = 8

# In a file wide elements come first, so that all are aligned; the names are in the order of safetensors.
_BOOL, *_OTHERS = dtypes.STORAGE_ITEM_BYTES
_RANKS = {name: rank for rank, name in enumerate(reversed([_BOOL, "F4", *_OTHERS]))}


class TensorSpec:
    """A tensor as contiguous bytes at an address, which the caller keeps.

    Args:
        dtype: As NumPy, ml_dtypes or torch call it: `float32`, `bfloat16`, `float4_e2m1fn_x2`, ….
        shape: Of the tensor; of packed elements the last extent counts bytes.
        data_ptr: Where the bytes are.
        data_len: How many.

    Raises:
        SafetensorError: The format has no such dtype.
    """

    __slots__ = ("_address", "_dtype", "_nbytes", "_shape")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        extents = [int(extent) for extent in shape]
        with translated():
            self._dtype = _storage_dtype(dtype)
            least = min([data_ptr, data_len, *extents])
            if least < 0:
                raise NotPositive(f"{least} is no extent, address or number of bytes")
        if dtype == PACKED and extents:
            extents[-1] *= 2
        self._shape, self._address, self._nbytes = extents, data_ptr, data_len

    @property
    def dtype(self) -> str:
        """As files call it: `F32`."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """As files have it: in elements, also of packed ones."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """Where the bytes are."""
        return self._address

    @property
    def data_len(self) -> int:
        """How many bytes there are."""
        return self._nbytes

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype={self.dtype!r}, shape={self.shape}, data_ptr={self.data_ptr}, "
            f"data_len={self.data_len})"
        )


def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file of tensors, by name, and text for people.

    Raises:
        SafetensorError: A tensor has another number of bytes than its shape and dtype say.
        TypeError: Something is not of the type that it has to be of.
    """
    with translated():
        header, placed = _planned(tensor_dict, metadata)
    parts = [(ctypes.c_char * spec.data_len).from_address(spec.data_ptr) for spec in placed]
    return b"".join([header, *parts])


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes what `serialize` returns to a file, durably; an earlier file of the name stays until then.

    Raises:
        SafetensorError: As `serialize`, or the file cannot be written.
        TypeError: As `serialize`.
    """
    save_described(lambda: (None, tensor_dict), filename, metadata, time.monotonic())


def save_described(
    describe: Callable[[], tuple[object, Mapping[str, TensorSpec]]],
    filename: PathLike,
    metadata: Mapping[str, str] | None,
    begun_s: float,
) -> None:
    """Writes a file, durably, of which observers hear as of every save.

    Args:
        describe: Returns what keeps the memory of tensors, and these by name.
        filename: The file.
        metadata: Text for people.
        begun_s: When the save was called, by the monotonic clock.
    """
    with failures_of_save(filename, begun_s), naming_file(filename):
        held, specs = describe()
        header, placed = _planned(specs, metadata)
        lengths = [spec.data_len for spec in placed]
        words = _plans.byte_segments(len(header), lengths, [spec.data_ptr for spec in placed])
        path, nbytes = storage.absolute(filename), len(header) + sum(lengths)
        sync_s, synced_at_s = _write(path, header, nbytes, words)
        del held  # until here the addresses are in use
    duration_s, synced_s = time.monotonic() - begun_s, synced_at_s - begun_s
    statistics = SaveStatistics(path, nbytes, duration_s, synced_s - sync_s, synced_s, duration_s)
    tell([statistics], current_options().array.saving.on_statistics, "array.saving.on_statistics")


def failures_of_save(filename: PathLike, begun_s: float) -> contextlib.AbstractContextManager[None]:
    """Publishes what the block raises as the failure of a save of a file."""
    try:
        path = storage.absolute(filename)
    except WaystationError:
        path = "(no location)"  # and not what was given, in which there may be credentials
    return failures_published("save", path, begun_s)


@contextlib.contextmanager
def naming_file(filename: PathLike) -> Iterator[None]:
    """`translated` for what writes a file."""
    with translated():
        path = storage.absolute(filename)
    with translated(path):
        yield


def _planned(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[TensorSpec]]:
    """The header, and the tensors that have bytes in the order of the file."""
    if not isinstance(tensors, Mapping):
        raise WrongType(f"tensors must be a dict of TensorSpec by name, not a {type(tensors).__name__}")
    for name, spec in tensors.items():
        _check(name, spec)
    _check_text(metadata or {})
    ordered = sorted(tensors.items(), key=lambda entry: (_RANKS[entry[1].dtype], entry[0]))
    header = _native.build_safetensors_header(
        [(name, spec.dtype, spec.shape) for name, spec in ordered],
        dict(metadata) if metadata is not None else None,
        _HEADER_ALIGN_BYTES,
    )
    return header, [spec for _, spec in ordered if spec.data_len]


def _check_text(metadata: Mapping[Any, Any]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise WrongType(f"metadata must map text to text, not {value!r:.60} by {key!r:.60}")


def _check(name: object, spec: object) -> None:
    if not isinstance(name, str):
        raise WrongType(f"the name of a tensor must be text, not {name!r:.60}")
    if not isinstance(spec, TensorSpec):
        raise WrongType(f"a {type(spec).__name__} is no TensorSpec", tensor=name)
    bits = 4 if spec.dtype == "F4" else 8 * dtypes.STORAGE_ITEM_BYTES[spec.dtype]
    if bits * math.prod(spec.shape) != 8 * spec.data_len:
        raise InvalidInput(
            f"{spec.data_len} bytes are given, and {spec.dtype} with the shape {tuple(spec.shape)} has "
            f"{bits * math.prod(spec.shape) / 8:g}",
            tensor=name,
        )
    if spec.data_len and not spec.data_ptr:
        raise InvalidInput("the address of the tensor's bytes is 0, where nothing is", tensor=name)


def _storage_dtype(name: str) -> str:
    if name == PACKED:
        return "F4"
    known = dtypes.TABLE.get(name)
    if known is None or known.trailing:
        raise NoSuchDtype(f"safetensors has no dtype for {name}; cast the tensor")
    return known.storage


def _write(path: str, header: bytes, nbytes: int, words: _plans.Words) -> tuple[float, float]:
    """Writes a file beside its place, makes it durable and moves it there.

    Returns:
        How long the sync took, and when it had ended, by the monotonic clock.
    """
    if storage.is_directory(path):
        raise Directory(f"'{path}' is a directory; give the name of a file", path=path)
    directory, name = os.path.split(path)
    staged = os.path.join(directory, storage.names.attempt(name, new_attempt_id()))
    options = current_options()
    try:
        engine_job.calibrate_once(directory, options, nbytes)
        files = [(staged, header, nbytes, words)]
        jobs: list[_native.Job] = []
        engine_job.run(files, None, options, (), jobs.append, lambda: None, lambda: None, sync=True)
        sync_s, synced_at_s = jobs[0].result()["sync_s"], time.monotonic()
        storage.renames(path).over(staged, path, "write")
        _native.sync_paths([directory])
    finally:
        with contextlib.suppress(OSError):
            storage.remove_file(staged)
    return sync_s, synced_at_s
