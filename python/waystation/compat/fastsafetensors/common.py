"""What is known of a file before its data are read, and a group of one process.

Invariant: every header is checked whole, by more rules than fastsafetensors has: what follows the last
tensor, a name that occurs twice, and metadata that are no text are refused, too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from waystation import _native, storage
from waystation._errors import Corrupt, InvalidInput, from_os_error
from waystation.compat.fastsafetensors.st_types import DType, dtype_of
from waystation.compat.opening import parsed_header
from waystation.safetensors.headers import LENGTH_BYTES, LIMIT_BYTES, Header, read_header


class OutsideOfTensor(InvalidInput, IndexError):
    """An index, or an axis, that a tensor does not have."""


class SingleGroup:
    """A group of this process alone."""

    def size(self) -> int:
        """The number of processes."""
        return 1

    def rank(self) -> int:
        """Which of them this is."""
        return 0


@dataclass
class TensorFrame:
    """A tensor, or a part of one, in a file.

    Attributes:
        dtype: Of its elements.
        shape: In elements, also of packed ones.
        data_offsets: Where its data begin and end, from where those of the file begin.
        strides: From one element to the next along each axis, in elements.
        offsets: The first element along each axis.
        sliced: Whether it is a part.
    """

    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool

    @classmethod
    def from_buffer(cls, entry: Mapping[str, Any]) -> TensorFrame:
        """The tensor of an entry of a header.

        Raises:
            ValueError: Its shape is none.
        """
        shape = entry["shape"]
        if not isinstance(shape, list) or any(type(extent) is not int or extent < 0 for extent in shape):
            raise Corrupt(f"{shape!r:.200} is no shape")
        return cls.whole(dtype_of(entry["dtype"]), shape, list(entry["data_offsets"]))

    @classmethod
    def whole(cls, dtype: DType, shape: Sequence[int], data_offsets: list[int]) -> TensorFrame:
        """A whole tensor."""
        strides: list[int] = []
        step = 1
        for extent in reversed(shape):
            strides.insert(0, step)
            step *= extent
        return cls(dtype, list(shape), data_offsets, strides, [0] * len(strides), False)

    def __getitem__(self, index: Any) -> TensorFrame:
        """A part of it, by integers and slices; one without elements has no axes.

        Raises:
            IndexError: It is outside.
            ValueError: A slice has the step 0.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise OutsideOfTensor(f"{index!r:.200} has more indices than the shape {self.shape}")
        ranges = []
        for axis, (part, extent) in enumerate(zip(parts, self.shape, strict=False)):
            ranges.append(_range_of(part, extent, axis))
            if not ranges[-1]:
                return TensorFrame(self.dtype, [], self.data_offsets, [], [], False)
        ranges += [range(extent) for extent in self.shape[len(parts) :]]
        return TensorFrame(
            self.dtype,
            [len(taken) for taken in ranges],
            self.data_offsets,
            [stride * taken.step for stride, taken in zip(self.strides, ranges, strict=True)],
            [offset + taken.start for offset, taken in zip(self.offsets, ranges, strict=True)],
            True,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.data_offsets[1] - self.data_offsets[0]


def _range_of(part: Any, extent: int, axis: int) -> range:
    if isinstance(part, slice):
        try:
            return range(*part.indices(extent))
        except ValueError as error:
            raise InvalidInput(f"{part!r} is no slice: {error}") from error
    if not isinstance(part, int):
        raise OutsideOfTensor(f"{part!r:.60} is no index; give integers and slices")
    if not -extent <= part < extent:
        raise OutsideOfTensor(f"{part} is outside of axis {axis}, which has {extent} elements")
    return range(part % extent, part % extent + 1)


class SafeTensorsMetadata:
    """The header of a file.

    Attributes:
        src: The file.
        metadata: Text for people; an empty string if there is none.
        tensors: What the file holds, by name, in the order of its data.
        header_length: Where the data begin.
        size_bytes: The length of the file.
        framework: What was given as that.
        header: The same as the rest of this library has it.
    """

    def __init__(
        self,
        string: str,
        header_length: int,
        size_bytes: int,
        framework: Any,
        src: str = "",
        keep_orig_dict: bool = False,
    ) -> None:
        length = (header_length - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        self._take(parsed_header(length + string.encode(), size_bytes, src), framework, src)

    def _take(self, header: Header, framework: Any, src: str) -> Self:
        self.src = src
        self.framework = framework
        self.header = header
        self.metadata: dict[str, str] | str = header.metadata if header.metadata is not None else ""
        self.header_length: int = header.data_start
        self.size_bytes: int = header.identity.nbytes
        self.tensors: dict[str, TensorFrame] = {}
        for name, dtype, shape, begin, end in header.tensors:
            offsets = [begin - header.data_start, end - header.data_start]
            self.tensors[name] = TensorFrame.whole(dtype_of(dtype), shape, offsets)
        return self

    @classmethod
    def from_file(cls, filename: str, framework: Any) -> Self:
        """That of a file.

        Raises:
            FileNotFoundError: There is none.
            Corrupt: It is no safetensors file, or damaged.
        """
        header = read_header(storage.absolute(filename))
        return cls.__new__(cls)._take(header, framework, os.fspath(filename))

    @classmethod
    def from_fd(cls, fd: int, filename: str, framework: Any, keep_orig_dict: bool = False) -> Self:
        """That of an open file."""
        return cls.__new__(cls)._take(read_header(f"/proc/self/fd/{fd}"), framework, filename)

    @classmethod
    def from_buffer(cls, buf: int, buffer_len: int, filename: str, framework: Any) -> Self:
        """That of a file whose content is in memory, at an address that the caller vouches for."""
        data = ctypes.string_at(buf, min(buffer_len, LENGTH_BYTES))
        if len(data) == LENGTH_BYTES:
            nbytes = min(int.from_bytes(data, "little"), LIMIT_BYTES, buffer_len - LENGTH_BYTES)
            data += ctypes.string_at(buf + LENGTH_BYTES, nbytes)
        return cls.__new__(cls)._take(parsed_header(data, buffer_len, filename), framework, filename)

    def select_byte_ranges(
        self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096
    ) -> list[tuple[int, int]]:
        """Where in the file the chosen tensors are: ranges in order, those with gaps of at most `merge_gap`
        bytes between them made one."""
        return joined_ranges(
            [
                (self.header_length + frame.data_offsets[0], self.header_length + frame.data_offsets[1])
                for name, frame in self.tensors.items()
                if keep_tensor(name)
            ],
            merge_gap,
        )

    def __repr__(self) -> str:
        return f"SafeTensorsMetadata({self.src!r}, {len(self.tensors)} tensors)"


def joined_ranges(ranges: Sequence[tuple[int, int]], merge_gap: int) -> list[tuple[int, int]]:
    """Ranges in order as fewer of them; empty ones are left out."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if begin == end:
            continue
        if found and begin - found[-1][1] <= merge_gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def get_device_numa_node(device: int | None) -> int | None:
    """The NUMA node that a GPU is at; None if it has none, or there is no such GPU."""
    if device is None:
        return None
    bus = next((found["pci_bus_id"] for found in _native.devices() if found["ordinal"] == device), None)
    if bus is None:
        return None
    path = f"/sys/bus/pci/devices/{bus.lower()}/numa_node"
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise from_os_error(error, "read", path) from error
