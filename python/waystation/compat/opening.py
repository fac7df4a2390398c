"""`safe_open`: one safetensors file, its tensors and parts of them, as the safetensors package opens it.

Invariants: the header is checked whole before anything else is read; an index that is outside of a tensor is
an error, also where NumPy would cut it off, except that torch tensors are indexed as torch does. A file that
is mapped must not change while its tensors live.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from waystation import _native, _plans, storage
from waystation._errors import (
    InvalidInput,
    NotDirectory,
    NotFound,
    TensorNotFound,
    UnusablePath,
    WaystationError,
    WrongType,
)
from waystation._options.in_effect import current_options
from waystation.compat.errors import Directory, NoSuchDevice, NotPositive, translated, translation
from waystation.frameworks import casts, dtypes
from waystation.frameworks.base import Codec, StoredArray
from waystation.layouts.native import memory
from waystation.layouts.native.memory import as_array
from waystation.safetensors.handle import Tensors
from waystation.safetensors.headers import Header, read_header
from waystation.safetensors.load import load
from waystation.safetensors.making import Framework, as_held_by, codec_of, naming_tensor, naming_tensors
from waystation.safetensors.mapped import Mappings
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.request import failures_of
from waystation.safetensors.sources import PathLike

Backend = Literal["mmap", "pread"]

_FRAMEWORKS: dict[str, Framework] = {
    **dict.fromkeys(("pt", "torch", "pytorch"), "torch"),
    **dict.fromkeys(("np", "numpy"), "numpy"),
    **dict.fromkeys(("jax", "flax"), "jax"),
}


class safe_open:  # noqa: N801
    """A safetensors file whose tensors are read as they are asked for.

    Args:
        filename: The file, or its location (`s3://bucket/model.safetensors`, `https://…`).
        framework: What tensors come as: `pt` (`torch`), `np` (`numpy`) or `flax` (`jax`).
        device: Where they go. For torch a device, its name or the number of a GPU.
        backend: `"mmap"` has torch tensors on the CPU alias the mapped file, as the safetensors package does;
            everything else, what is in an object store, and all of it with `"pread"`, is read.

    Raises:
        FileNotFoundError: There is no such file.
        SafetensorError: It is damaged, or cannot be opened as asked.
    """

    def __init__(
        self,
        filename: PathLike,
        framework: str,
        device: Any = "cpu",
        *,
        backend: Backend = "mmap",
    ) -> None:
        with translated():
            name = _FRAMEWORKS.get(framework)
            if name is None:
                known = ", ".join(map(repr, _FRAMEWORKS))
                raise InvalidInput(f"there is no framework {framework!r} here; the frameworks are {known}")
            if backend not in ("mmap", "pread"):
                raise InvalidInput(f"backend must be 'mmap' or 'pread', not {backend!r}")
            with _no_such_file():
                path = _path_of(filename)
                header = read_header(path)
            self._path = path
            with translated(path):
                place = _place(name, device)
            opened = OpenFiles([header])
            self._tensors = Tensors(opened, name, place)
            self._device = place
            self._is_closed = False
            self._codec = codec_of(name)
            is_mapped = backend == "mmap" and name == "torch" and str(place) == "cpu" and opened.is_local
            self._mappings = Mappings(opened, None, one_by_one=True) if is_mapped else None

    # ---- what is there -------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """The names of the tensors, sorted."""
        with self._open():
            return sorted(self._tensors.keys())

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in the order of the file."""
        with self._open():
            return list(self._tensors.keys())

    def metadata(self) -> dict[str, str] | None:
        """The text for people; None if there is none."""
        with self._open():
            return self._tensors.opened.headers[0].metadata

    # ---- reading -------------------------------------------------------------------------------

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor.

        Raises:
            SafetensorError: There is none of that name, or it cannot be read.
        """
        try:
            self._check_open()
            number = self._number(name)
            mapped = self._mapped(number)
            if mapped is not None:
                return mapped
            if self._codec.name == "jax":
                dtype = self._tensors.opened.array(number).dtype
                if dtype_held("jax", dtype) != dtype:
                    return self._load([name])[name]
            return self._tensors.tensor(name)
        # Not by a block of `_open`, which would take as long as all else does for a small tensor.
        except WaystationError as error:
            raise translation(error, self._path) from error.__cause__

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors: arrays by name, in the order of the file."""
        with self._open():
            return self._load(None)

    def get_slice(self, name: str) -> SafeSlice:
        """A tensor of which parts can be read.

        Raises:
            SafetensorError: There is none of that name.
        """
        with self._open():
            return SafeSlice(self, self._number(name))

    def _mapped(self, number: int) -> Any:
        """A tensor that aliases the mapped file; None where it has to be read, as all that is verified."""
        if self._mappings is None or current_options().array.loading.verify:
            return None
        array = self._mappings.tensor(number)
        return None if array is None else self._tensors.made_of(number, array)

    def _load(self, select: list[str] | None) -> dict[str, Any]:
        return load(
            self._tensors,
            framework=_FRAMEWORKS[self._codec.name],
            device=self._device,
            select=select,
            dtype=narrowing(self._codec.name),
            mmap=self._mappings is not None,
        )

    def _number(self, name: str) -> int:
        if not isinstance(name, str):
            raise WrongType(f"the name of a tensor must be text, not {name!r:.60}")
        opened = self._tensors.opened
        number = opened.numbers.get(name)
        if number is None:
            raise TensorNotFound(f"the file has no tensor {name!r}", path=opened.headers[0].path)
        return number

    # ---- closing -------------------------------------------------------------------------------

    @contextmanager
    def _open(self) -> Iterator[None]:
        with translated(self._path):
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInput("the file was closed; open it again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._tensors.close()


def load_whole(
    filename: PathLike, framework: str, device: Any = "cpu", *, backend: Backend
) -> dict[str, Any]:
    """All tensors of a file; observers hear of it, also where the file cannot be opened."""
    with failures_of(filename):
        opened = safe_open(filename, framework, device, backend=backend)
    with opened:
        return opened.get_tensors()


class SafeSlice:
    """A tensor of which parts can be read, by integers, slices and `...`."""

    def __init__(self, opened: safe_open, number: int) -> None:
        self._opened = opened
        self._number = number

    @property
    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        return self._opened._tensors.opened.tensors[self._number]

    def get_shape(self) -> list[int]:
        """The shape of the tensor, as the file has it."""
        with self._opened._open():
            return list(self._tensor[2])

    def get_dtype(self) -> str:
        """The dtype of the tensor, as the file calls it: `F32`."""
        with self._opened._open():
            return self._tensor[1]

    def __getitem__(self, index: Any) -> Any:
        """Reads a part: as much of the file as it takes.

        Raises:
            SafetensorError: The index is none of these, or outside of the tensor.
        """
        with self._opened._open():
            if self._opened._codec.name == "torch":
                return self._torch_part(index)
            tensors, codec = self._opened._tensors, self._opened._codec
            stored = as_held_by(tensors.opened.array(self._number), codec.name)
            name = self._tensor[0]
            inner, steps = _checked(index, stored.shape, name)
            if dtype_held(codec.name, stored.dtype) == stored.dtype:
                return _stepped(tensors.slice(name)[inner], steps)
            host = _stepped(Tensors(tensors.opened, "numpy", None).slice(name)[inner], steps)
            try:
                return made(codec, codec.place_of(self._opened._device), [stored], [host])[0]
            except WaystationError as error:  # a number that JAX without 64-bit mode has no room for
                raise naming_tensor(error, tensors.opened, [self._number]).where(tensor=name)

    def _torch_part(self, index: Any) -> Any:
        """A part by any index that torch takes, with its errors."""
        tensors, name = self._opened._tensors, self._tensor[0]
        mapped = self._opened._mapped(self._number)
        if mapped is not None:
            return mapped[index]
        shape = tensors.opened.array(self._number).shape
        try:
            inner, steps = _checked(index, shape, name)
            return tensors.slice(name)[inner][steps]
        except InvalidInput:  # or for torch to refuse
            return tensors.tensor(name)[index]


@contextmanager
def _no_such_file() -> Iterator[None]:
    """Raises of a path at which no file can be what the safetensors package does."""
    try:
        yield
    except (NotDirectory, UnusablePath) as error:
        raise NotFound(error.message, **error.context) from error


def _path_of(filename: PathLike) -> str:
    if isinstance(filename, bytes):
        raise WrongType("a path is text or os.PathLike, not bytes; use os.fsdecode(path)")
    path = storage.located(filename)
    if storage.of(path).is_listable and storage.is_directory(path):
        raise Directory(f"'{path}' is a directory; give the name of a file", path=path)
    return path


def _place(framework: Framework, device: Any) -> Any:
    """A device as codecs take it."""
    if framework == "torch":
        named = f"cuda:{device}" if isinstance(device, int) else device
        try:
            codec_of(framework).place_of(named)
        except InvalidInput as error:
            raise NoSuchDevice(error.message) from error
        return "cpu" if named is None else named
    if device in ("cpu", None):
        return None
    if framework == "numpy":
        raise InvalidInput(f"NumPy arrays are in host memory, and cannot be on {device!r:.60}")
    return device


def _stepped(part: Any, steps: tuple[slice, ...]) -> Any:
    # An array without axes, indexed by nothing, would become a scalar.
    return part[steps] if steps else part


def _checked(index: Any, shape: tuple[int, ...], name: str) -> tuple[tuple[Any, ...], tuple[slice, ...]]:
    """An index as one without steps, and what takes the steps then."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if isinstance(index, list) and not index:  # which selects no row, as NumPy has it
        parts = [slice(0, 0)]
    gaps = [place for place, part in enumerate(parts) if part is ...]
    given = len(parts) - len(gaps)
    if given > len(shape) or len(gaps) > 1:
        raise InvalidInput(f"{index!r:.200} has more indices than the shape {shape}", tensor=name)
    gap = gaps[0] if gaps else len(parts)
    parts[gap : gap + 1] = [slice(None)] * (len(shape) - given)
    inner: list[Any] = []
    steps: list[slice] = []
    for part, extent in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            begin, end, step = _range(part, extent, name)
            inner.append(slice(begin, end))
            steps.append(slice(None, None, step))
        else:
            inner.append(int(part) if isinstance(part, bool) else part)  # as that package takes True
    return tuple(inner), tuple(steps)


def _range(part: slice, extent: int, name: str) -> tuple[int, int, int]:
    begin = 0 if part.start is None else part.start
    end = extent if part.stop is None else part.stop
    step = 1 if part.step is None else part.step
    if step < 1:
        raise InvalidInput(f"a slice has a step of 1 at least, not {step}", tensor=name)
    if begin < 0 or end < 0:
        raise NotPositive(f"{part!r} counts from the end; count from the beginning", tensor=name)
    if end > extent or begin > end:
        raise InvalidInput(f"{part!r} is not within the {extent} elements of its axis", tensor=name)
    return begin, end, step


# ---- host arrays as arrays of a framework ------------------------------------------------------
# Host arrays as arrays of a framework, in the way of the safetensors package.
#
# Invariants: host arrays that are given are given away, since what is made may alias them. Where JAX has no
# 64-bit floats, 32-bit ones take their place, as that package has it; values that would not fit are
# refused.


def dtype_held(framework: str, dtype: str) -> str:
    """The dtype that a framework has in place of one that it lacks for now."""
    if framework == "jax" and dtype == "float64":
        from waystation.frameworks import jax_dtypes

        return dtype if jax_dtypes.wide_enabled() else jax_dtypes.WIDE[dtype]
    return dtype


def narrowing(framework: str) -> dict[str, str] | None:
    """The same for all dtypes that change, as a load takes it."""
    held = dtype_held(framework, "float64")
    return None if held == "float64" else {"float64": held}


def made(
    codec: Codec, place: Any, stored: Sequence[StoredArray], arrays: Sequence[NDArray[Any]]
) -> list[Any]:
    """Arrays of a framework from host arrays of its dtypes.

    Args:
        codec: Of the framework.
        place: Where they go, as the codec has it.
        stored: What each is of; its shape counts for nothing.
        arrays: The host arrays.

    Raises:
        Unsupported: The framework has no such dtype.
    """
    described, held = [], []
    for tensor, array in zip(stored, arrays, strict=True):
        dtype = dtype_held(codec.name, tensor.dtype)
        logical = dtypes.of_name(dtype)
        held.append(array if dtype == tensor.dtype else _cast(array, logical.host))
        shape = tuple(array.shape)
        described.append(
            StoredArray(shape, dtype, codec.name, logical.storage, logical.storage_shape(shape), None, {})
        )
    targets = codec.placed(described, [array.dtype for array in described], [place] * len(held))
    return codec.assemble(targets, [[array] for array in held])


def _cast(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    found = np.empty(array.shape, dtype)
    casts.copy(found, array, casts.rule_of_loads(current_options()))
    return found


# ---- bytes instead of files --------------------------------------------------------------------
# The bytes of a safetensors file as tensors, without a file.
#
# Invariants: the header is checked whole, as that of a file; what is made shares no memory with the bytes.


_NO_PATH = "<bytes>"


def deserialize(bytes: Buffer) -> list[tuple[str, dict[str, Any]]]:  # noqa: A002
    """The tensors of a file that is in memory: names, each with `dtype`, `shape` and `data`.

    Raises:
        SafetensorError: They are not the bytes of a safetensors file.
        TypeError: They are no bytes.
    """
    with translated():
        tensors = _opened(bytes).tensors
    view = memoryview(bytes)
    return [
        (name, {"dtype": dtype, "shape": list(shape), "data": bytearray(view[begin:end])})
        for name, dtype, shape, begin, end in tensors
    ]


def load_bytes(data: Buffer, framework: Framework) -> dict[str, Any]:
    """The tensors of a file that is in memory, as arrays of a framework on its default device."""
    with translated():
        opened = _opened(data)
        codec = codec_of(framework)
        numbers = range(len(opened.tensors))
        stored = [as_held_by(opened.array(number), codec.name) for number in numbers]
        spans = np.array([tensor[3:] for tensor in opened.tensors], np.int64).reshape(-1, 2)
        sizes = spans[:, 1] - spans[:, 0]
        places, addresses = memory.allocate(sizes.tolist())
        start = np.frombuffer(data, np.uint8).ctypes.data
        copies = _plans.of_columns(
            _plans.HOST_COPY, destination=addresses, source=start + spans[:, 0], nbytes=sizes
        )
        _native.copy_batch(copies, (data, places))
        held = [
            as_array(place, tensor.shape, dtypes.of_stored(tensor).host)
            for place, tensor in zip(places, stored, strict=True)
        ]
        with naming_tensors(opened, numbers):
            found = made(codec, codec.place_of(None), stored, held)
    return dict(zip(opened.labels, found, strict=True))


def _opened(data: Buffer) -> OpenFiles:
    try:
        nbytes = memoryview(data).nbytes
    except TypeError as error:
        raise WrongType(f"the content of a file must be bytes, not a {type(data).__name__}") from error
    return OpenFiles([parsed_header(data, nbytes, _NO_PATH)])


def parsed_header(data: Buffer, file_bytes: int, path: str) -> Header:
    """The header at the beginning of bytes that are, or are the first ones, of a file of a length.

    Raises:
        Corrupt: They are not those of a safetensors file of that length.
    """
    metadata, tensors, data_start = _native.parse_safetensors_header(data, file_bytes, path)
    identity = storage.Identity(0, 0, file_bytes, 0)
    return Header(path, identity, metadata, tensors, data_start, storage.of(path))
