"""Packs what is told: mostly integers, a few objects that are the same each time, now and then a large one.

A *pack* has integers of 64 bits, objects to which integers refer by number, and the elements of the arrays
in these objects. An object that is said to be `known` travels once for each connection, the first time that
it is referred to; others travel in the pack that refers to them. So a few integers tell a host to run a list
once more, and nothing is pickled. Of an array, the pickle has dtype, shape and place; its elements travel as
they are. Packs are unpacked in the order in which they were packed. Objects are unpickled: only what has come
over a connection whose other end has proved itself may be unpacked. No I/O.
"""

from __future__ import annotations

import copyreg
import functools
import io
import math
import pickle
import struct
from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from waystation._errors import Corrupt, Unsupported
from waystation.frameworks import dtypes

# When so many are known, both ends forget all of them.
MOST_KNOWN = 1 << 13

_HEADER = struct.Struct("<BQQQ")
_INTEGER_BYTES = 8


class Packer:
    """One direction of a connection; makes one pack after the other.

    Attributes:
        integers: What has been said in the pack that is being made.
    """

    def __init__(self) -> None:
        self.integers = array("q")
        self._known: dict[Hashable, int] = {}
        self._new: list[Any] = []
        self._objects: list[Any] = []
        self._forget = False

    def known(self, value: Hashable) -> int:
        """The number of an object that is referred to again and again."""
        number = self._known.get(value)
        if number is None:
            number = self._known[value] = len(self._known)
            self._new.append(value)
        return number

    def object(self, value: Any) -> int:
        """The number, in this pack, of an object that is referred to once."""
        self._objects.append(value)
        return len(self._objects) - 1

    def numbers(self, values: Sequence[int]) -> None:
        """Says some integers, and how many."""
        self.integers.append(len(values))
        self.integers.extend(values)

    def take(self) -> bytes:
        """The pack; another begins."""
        said, arrays = _pickled(self._new, self._objects) if self._new or self._objects else (b"", [])
        elements = [array.reshape(-1).view(np.uint8).data for array in arrays]
        header = _HEADER.pack(self._forget, len(self.integers), len(said), sum(map(len, elements)))
        packed = b"".join((header, self.integers.tobytes(), said, *elements))
        self._forget = len(self._known) >= MOST_KNOWN
        if self._forget:
            self._known.clear()
        self.integers = array("q")
        self._new, self._objects = [], []
        return packed


class Unpacker:
    """The other end of a `Packer`."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def open(self, packed: bytes) -> Pack:
        """What a pack says.

        Raises:
            Corrupt: It is none.
        """
        start = _HEADER.size
        if len(packed) < start:
            raise Corrupt(f"a pack of control has {len(packed)} bytes")
        forget, integers, said, elements = _HEADER.unpack_from(packed)
        objects_at = start + integers * _INTEGER_BYTES
        elements_at = objects_at + said
        if len(packed) != elements_at + elements:
            raise Corrupt(f"a pack of control has {len(packed)} bytes, and says {elements_at + elements}")
        if forget:
            self._known = []
        view = memoryview(packed)
        new, objects = _unpickled(view[objects_at:elements_at], view[elements_at:]) if said else ((), ())
        self._known += new
        numbers = array("q")
        numbers.frombytes(view[start:objects_at])
        return Pack(numbers, self._known, objects)


class _Arrays:
    """Takes the arrays of a pickle, whose elements are left out of it."""

    def __init__(self) -> None:
        self.found: list[np.ndarray[Any, Any]] = []
        self._nbytes = 0

    def reduce(self, value: np.ndarray[Any, Any]) -> Any:
        """What stands for an array: its dtype, its shape, and where its elements begin."""
        name = _name_of(value.dtype)
        if name is None:
            return value.__reduce_ex__(5)
        start = self._nbytes
        self.found.append(np.ascontiguousarray(value))
        self._nbytes += value.nbytes
        return _array_at, (name, value.shape, start)


def _array_at(name: str, shape: tuple[int, ...], start: int) -> np.ndarray[Any, Any]:
    """Stands for `_Unpickler.array_at` where no array of a pack has elements."""
    return _Unpickler(io.BytesIO(), memoryview(b"")).array_at(name, shape, start)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, elements: memoryview) -> None:
        super().__init__(file)
        self._elements = elements

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        if (module, name) == (__name__, _array_at.__name__):
            return self.array_at
        return super().find_class(module, name)

    def array_at(self, name: str, shape: tuple[int, ...], start: int) -> np.ndarray[Any, Any]:
        """An array whose elements begin there."""
        dtype = dtypes.numpy_dtype(name)
        if dtype is None:
            raise Corrupt(f"an array of control has a dtype that NumPy has none for: '{name}'")
        count = math.prod(shape)
        if not 0 <= start <= start + count * dtype.itemsize <= len(self._elements):
            raise Corrupt("an array of control lies outside of its pack")
        made: np.ndarray[Any, Any] = np.empty(shape, dtype)
        made.reshape(-1).view(np.uint8)[:] = self._elements[start : start + made.nbytes]
        return made


@functools.lru_cache
def _name_of(dtype: np.dtype[Any]) -> str | None:
    """What a dtype travels as; None if its elements are no plain bytes, as those of objects."""
    try:
        name = dtypes.of_numpy(dtype).name
    except Unsupported:
        return None
    return name if dtypes.numpy_dtype(name) == dtype else None


def _pickled(new: list[Any], objects: list[Any]) -> tuple[bytes, list[np.ndarray[Any, Any]]]:
    arrays, file = _Arrays(), io.BytesIO()
    pickler = pickle.Pickler(file, 5)
    # Nothing of Python's is asked of other objects, as methods of a pickler of our own would be.
    pickler.dispatch_table = copyreg.dispatch_table | {np.ndarray: arrays.reduce}
    pickler.dump((new, objects))
    return file.getvalue(), arrays.found


def _unpickled(said: memoryview, elements: memoryview) -> tuple[list[Any], list[Any]]:
    """What a pickle has, of which the other end has proved itself."""
    unpickler = _Unpickler(io.BytesIO(said), elements) if elements else None
    found: tuple[list[Any], list[Any]] = unpickler.load() if unpickler else pickle.loads(said)  # noqa: S301
    return found


class Pack:
    """What a pack says, read from its beginning.

    Args:
        integers: Its integers.
        known: Objects by the numbers of `Packer.known`.
        objects: Objects by those of `Packer.object`.
    """

    def __init__(self, integers: array[int], known: Sequence[Any], objects: Sequence[Any]) -> None:
        self._integers = integers
        self._known = known
        self._objects = objects
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether all integers have been read."""
        return self._at >= len(self._integers)

    def integer(self) -> int:
        """The next integer."""
        self._at += 1
        return self._integers[self._at - 1]

    def numbers(self) -> tuple[int, ...]:
        """The next integers, as `Packer.numbers` has said them."""
        count = self.integer()
        start, self._at = self._at, self._at + count
        return tuple(self._integers[start : self._at])

    def known(self) -> Any:
        """What the next integer refers to, of objects that are known."""
        return self._known[self.integer()]

    def object(self) -> Any:
        """What the next integer refers to, of those of this pack."""
        return self._objects[self.integer()]

    def optional_object(self) -> Any:
        """What the next integer refers to, of those of this pack; None where it is -1."""
        number = self.integer()
        return None if number < 0 else self._objects[number]
