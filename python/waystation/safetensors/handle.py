"""`open`: the tensors of some files, looked at and read one by one.

Opening reads and checks every header, and no data. The caller's thread reads small parts, and a job of the
engine each larger one: for many tensors `load` and `stream` are quicker.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, KeysView, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from waystation._errors import InvalidInput, TensorNotFound, WaystationError
from waystation._options import Options
from waystation._options.in_effect import current_options
from waystation.frameworks import dtypes
from waystation.frameworks.base import StoredArray, Target
from waystation.grid import Box, contiguous_span, whole
from waystation.layouts.native import memory
from waystation.layouts.opened import ReadStatistics, Request
from waystation.safetensors.description import describe
from waystation.safetensors.making import Framework, as_held_by, codec_of, naming_tensor
from waystation.safetensors.open_files import OpenFiles
from waystation.safetensors.sources import Files, find


def open(  # noqa: A001
    files: Files, *, framework: Framework = "numpy", device: Any = None
) -> Tensors:
    """Opens a published model: reads and checks the headers of its files, and no data.

    Args:
        files: A file, several files, an index (`model.safetensors.index.json`), or a directory that holds
            one of these, which may be one of a cache of Hugging Face. Each is a path, a location
            (`s3://bucket/model/`) or the URL of a file (`https://…`).
        framework: What tensors are read as: `"numpy"`, `"torch"` or `"jax"`.
        device: Where they go: a device of the framework or its name, for JAX also a sharding. By default
            the CPU for torch, the default device for JAX.

    Raises:
        NotFound: There is nothing there.
        InvalidInput: It cannot be told what is meant.
        Corrupt: A file is damaged, missing, or not what its index says; the error names file and tensor.
    """
    return Tensors(OpenFiles(find(files)), framework, device)


@dataclasses.dataclass(slots=True)
class _Kind:
    """What tensors that are alike are read to.

    Attributes:
        stored: What describes them.
        target: Where they go.
        form: What their bytes are.
        shape: The same.
        nbytes: Of each.
        is_piece: Whether each is needed in one piece, and has bytes.
    """

    stored: StoredArray
    target: Target
    form: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    is_piece: bool


class Tensors:
    """The tensors of a published model, by name. `open` makes it; usable as a context manager.

    Attributes:
        path: The file, or the directory of several.
    """

    def __init__(self, opened: OpenFiles, framework: str, device: Any) -> None:
        self._codec = codec_of(framework)
        self._place = self._codec.place_of(device)
        self._open: OpenFiles | None = opened
        self.path: str = opened.path
        self._circumstances = self._codec.circumstances
        # Of whole tensors, by what describes them and the circumstances: those of a model are of few kinds.
        self._kinds: dict[object, _Kind] = {}

    @property
    def opened(self) -> OpenFiles:
        """What is read. Internal.

        Raises:
            InvalidInput: It was closed.
        """
        if self._open is None:
            raise InvalidInput("the files were closed; open them again", path=self.path)
        return self._open

    # ---- what is there -------------------------------------------------------------------------

    @property
    def files(self) -> list[str]:
        """The paths of the files."""
        return [header.path for header in self.opened.headers]

    def keys(self) -> KeysView[str]:
        """The names of the tensors, in the order of the files and of the data in them."""
        return self.opened.numbers.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.opened.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.opened.numbers

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array, by name. Of packed 4-bit floats (F4) the last extent counts bytes."""
        return {tensor[0]: describe(tensor)[0] for tensor in self.opened.tensors}

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each array, by name: `float32`, `bfloat16`, and so on."""
        return {tensor[0]: describe(tensor)[1] for tensor in self.opened.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor[4] - tensor[3] for tensor in self.opened.tensors)

    def metadata(self) -> dict[str, str]:
        """The text that files hold for people (`__metadata__`); where they differ, that of the first."""
        found: dict[str, str] = {}
        for header in self.opened.headers:
            found = (header.metadata or {}) | found
        return found

    # ---- reading -------------------------------------------------------------------------------

    def tensor(self, name: str) -> Any:
        """Reads one tensor.

        Raises:
            TensorNotFound: There is no tensor of that name.
            Conflict: The file changed since it was opened.
            Corrupt, Unavailable: It cannot be read.
            Unsupported: The framework has no such dtype.
        """
        opened, number = self.opened, self._number(name)
        stored = opened.array(number)
        try:
            kind = self._kind_of(stored)
            if not (kind.is_piece and opened.is_small(number, kind.nbytes, current_options())):
                return self._read(number, whole(stored.shape), range(len(stored.shape)), kind.target)
            array = opened.read_small(number, 0, kind.form, kind.shape, kind.nbytes)
            return self._made(kind.target, [array])
        except WaystationError as error:
            raise naming_tensor(error, opened, [number]).where(tensor=name, path=opened.path_of(number))

    def made_of(self, number: int, array: np.ndarray[Any, Any]) -> Any:
        """A tensor of host memory that has its bytes. Internal."""
        stored = self.opened.array(number)
        try:
            return self._made(self._kind_of(stored).target, [array])
        except WaystationError as error:
            raise naming_tensor(error, self.opened, [number])

    def _kind_of(self, stored: StoredArray) -> _Kind:
        """What a tensor is read to; one object describes all tensors that are alike."""
        key = id(stored) if self._circumstances is None else (id(stored), self._circumstances())
        known = self._kinds.get(key)
        if known is not None:
            return known
        target = self._target(stored, stored.shape)
        form = dtypes.of_stored(stored).host
        nbytes = math.prod(stored.shape) * form.itemsize
        is_piece = nbytes > 0 and list(target.boxes) == [whole(stored.shape)]
        kind = self._kinds[key] = _Kind(stored, target, form, stored.shape, nbytes, is_piece)
        return kind

    def slice(self, name: str) -> TensorSlice:
        """A tensor of which parts can be read: `tensors.slice(name)[:8, ..., 3]`.

        Raises:
            TensorNotFound: There is no tensor of that name.
        """
        return TensorSlice(self, name, self.opened.array(self._number(name)).shape)

    def _number(self, name: str) -> int:
        number = self.opened.numbers.get(name)
        if number is None:
            raise TensorNotFound(f"there is no tensor {name!r}; {_some(self.opened.numbers)}", path=self.path)
        return number

    def read_part(self, name: str, box: Box, kept: Sequence[int]) -> Any:
        """Reads a box of a tensor, and makes an array of it that has the axes `kept`. Internal."""
        number = self._number(name)
        try:
            target = self._target(self.opened.array(number), tuple([box[1][axis] for axis in kept]))
            return self._read(number, box, kept, target)
        except WaystationError as error:
            raise naming_tensor(error, self.opened, [number]).where(tensor=name)

    def _target(self, stored: StoredArray, shape: tuple[int, ...]) -> Target:
        """Where an array of that shape goes which is of a tensor."""
        held = as_held_by(stored, self._codec.name)
        trailing = held.storage_shape[len(held.shape) :]
        part = dataclasses.replace(held, shape=shape, storage_shape=shape + trailing)
        return self._codec.placed([part], [part.dtype], [self._place])[0]

    def _read(self, number: int, box: Box, kept: Sequence[int], target: Target) -> Any:
        """Reads what a target needs of a box of a tensor, and makes an array that has the axes `kept`."""
        opened, options = self.opened, current_options()
        boxes = [_within(box, kept, inner) for inner in target.boxes]
        buffers = self._small(number, boxes, options)
        if buffers is None:
            request = Request(number, boxes)
            (buffers,) = opened.read_boxes(
                [request], options, lambda _: None, ReadStatistics(), memory.allocate
            )
        shaped = [buffer.reshape(inner[1]) for buffer, inner in zip(buffers, target.boxes, strict=True)]
        return self._made(target, shaped)

    def _made(self, target: Target, buffers: list[np.ndarray[Any, Any]]) -> Any:
        """The array of filled buffers."""
        made = self._codec.assemble([target], [buffers])
        self._codec.wait(made)
        return made[0]

    def _small(
        self, number: int, boxes: Sequence[Box], options: Options
    ) -> list[np.ndarray[Any, Any]] | None:
        """One box that lies in one piece in the file, read at once; None where a job of the engine has to."""
        opened = self.opened
        if len(boxes) != 1:
            return None
        stored = opened.array(number)
        form = dtypes.of_stored(stored).host
        span = contiguous_span(stored.shape, boxes[0])
        if span is None:
            return None
        first, nbytes = span[0] * form.itemsize, span[1] * form.itemsize
        if nbytes == 0 or not opened.is_small(number, nbytes, options):
            return None
        return [opened.read_small(number, first, form, boxes[0][1], nbytes)]

    # ---- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of the files; what was read stays. Idempotent."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorSlice:
    """A tensor of which parts can be read, by integers, slices of step 1, and `...`.

    Attributes:
        name: Of the tensor.
        shape: Its shape.
    """

    def __init__(self, tensors: Tensors, name: str, shape: tuple[int, ...]) -> None:
        self._tensors = tensors
        self.name = name
        self.shape = shape

    def __getitem__(self, index: Any) -> Any:
        """Reads a part: as much of the file as it takes.

        Raises:
            InvalidInput: The index is none of these, or outside of the tensor.
        """
        try:
            box, kept = _box_of(index, self.shape, self.name)
        except InvalidInput as error:
            opened = self._tensors.opened
            raise error.where(path=opened.path_of(opened.numbers[self.name]))
        return self._tensors.read_part(self.name, box, kept)


def _within(box: Box, kept: Sequence[int], inner: Box) -> Box:
    """The box of the tensor that is a box of the array that has the axes `kept` of another box of it."""
    offset, shape = list(box[0]), list(box[1])
    for axis, begin, extent in zip(kept, *inner, strict=True):
        offset[axis] += begin
        shape[axis] = extent
    return tuple(offset), tuple(shape)


def _box_of(index: Any, shape: tuple[int, ...], name: str) -> tuple[Box, list[int]]:
    """What an index selects of a tensor, and which axes stay."""
    parts = list(index) if isinstance(index, tuple) else [index]
    gaps = [place for place, part in enumerate(parts) if part is Ellipsis]
    given = len(parts) - len(gaps)
    if len(gaps) > 1 or given > len(shape):
        raise InvalidInput(f"{index!r} is no index of a tensor with the shape {shape}", tensor=name)
    gap = gaps[0] if gaps else len(parts)
    parts[gap : gap + 1] = [slice(None)] * (len(shape) - given)
    offset, extents, kept = [], [], []
    for axis, (part, extent) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            begin, end, step = part.indices(extent)
            if step != 1:
                raise InvalidInput(
                    f"slices have a step of 1, not {step}; step over what was read", tensor=name
                )
            offset.append(begin)
            extents.append(max(0, end - begin))
            kept.append(axis)
            continue
        try:
            if isinstance(part, bool):  # NumPy adds an axis for it
                raise TypeError
            at = operator.index(part)
        except TypeError:
            raise InvalidInput(
                f"{part!r:.60} is no index; give integers, slices and '...'", tensor=name
            ) from None
        if not -extent <= at < extent:
            raise InvalidInput(f"{at} is outside of axis {axis}, which has {extent} elements", tensor=name)
        offset.append(at % extent)
        extents.append(1)
    return (tuple(offset), tuple(extents)), kept


def _some(names: Mapping[str, int]) -> str:
    """A few of the names that there are."""
    shown = ", ".join(repr(name) for name, _ in zip(names, range(3), strict=False))
    return f"there are {len(names)}: {shown}, …" if len(names) > 3 else f"there are: {shown or 'none'}"
