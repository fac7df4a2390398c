"""Packs what is told: mostly integers, a few objects that are the same each time, now and then a large one.

A *pack* has integers of 64 bits, objects to which integers refer by number, and the elements of the arrays
in these objects. An object that is said to be `known` travels once for each connection, the first time that
it is referred to; others travel in the pack that refers to them. So a few integers tell a host to run a list
once more, and nothing is pickled. Of an array, the pickle has dtype, shape and place; its elements travel as
they are. Packs are unpacked in the order in which they were packed. Objects are unpickled: only what has come
over a connection whose other end has proved itself may be unpacked. No I/O.

The manager trusts neither programs nor hosts: it makes plain data, Waystation's errors, and what `MESSAGES`
names, and refuses all else. Messages and errors are told by a name and their fields, and never by their
class, whose attributes a pickle could change. Functions of programs reach the manager as bytes.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import math
import pickle
import struct
from array import array
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Any

import numpy as np

from waystation._errors import Corrupt, Unsupported, WaystationError
from waystation.frameworks import dtypes

# When so many are known, both ends forget all of them.
MOST_KNOWN = 1 << 13

# What programs and hosts tell the manager besides plain data and errors, by module.
MESSAGES = {
    "waystation._options.layouts": {"AtomicityMode", "CheckpointLayout"},
    "waystation.frameworks.base": {"StoredArray"},
    "waystation.frameworks.carried": {"AbstractKeys", "CarriedArray"},
    "waystation.frameworks.numpy_arrays": {"AbstractNumpy"},
    "waystation.runtime.controller.lowered": {"Dispatch"},
    "waystation.runtime.host_options": {"HostOptions", "SaveManner"},
    "waystation.runtime.ir.program": {"Value"},
    "waystation.runtime.ir.shardings": {"Sharding"},
    "waystation.runtime.messages": {"Fetched"},
    "waystation.runtime.resources.requests": {"Assignment", "SliceRequest"},
    "waystation.runtime.state_trees": {"StateTree"},
}
# What pickles of plain data name: types of Python, and what makes dtypes and scalars of NumPy.
_PLAIN = {
    "builtins": {"Ellipsis", "bool", "bytes", "complex", "float", "int", "str"},
    "ml_dtypes": {dtype.name for dtype in dtypes.TABLE.values()},
    "numpy": {"dtype"},
    "numpy._core.multiarray": {"scalar"},
    "numpy.core.multiarray": {"scalar"},
}

_HEADER = struct.Struct("<BQQQ")
_INTEGER_BYTES = 8
_PLAIN_CONTEXT = {str, int, float, bool}


class Packer:
    """One direction of a connection; makes one pack after the other.

    Attributes:
        integers: What has been said in the pack that is being made.
    """

    def __init__(self) -> None:
        self.integers: array[int] = array("q")
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
    """The other end of a `Packer`.

    Args:
        sender: Who has packed, if it is not trusted with more than plain data and messages.
    """

    def __init__(self, sender: str | None = None) -> None:
        self._sender = sender
        self._known: list[Any] = []

    def open(self, packed: bytes) -> Pack:
        """What a pack says.

        Raises:
            Corrupt: It is none, or has what the sender may not tell.
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
        new, objects = self._objects(view[objects_at:elements_at], view[elements_at:]) if said else ((), ())
        self._known += new
        numbers = array("q")
        numbers.frombytes(view[start:objects_at])
        return Pack(numbers, self._known, objects)

    def _objects(self, said: memoryview, elements: memoryview) -> tuple[list[Any], list[Any]]:
        try:
            new, objects = _Unpickler(io.BytesIO(said), elements, self._sender).load()
            return list(new), list(objects)
        except Corrupt:
            raise
        except Exception as error:
            raise Corrupt(
                f"the objects of a pack of control cannot be made: {type(error).__name__}: {error}"
            ) from error


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


class _Reductions(dict[type, Callable[[Any], Any]]):
    """How objects of each type are pickled, where not as Python does it."""

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        if issubclass(kind, WaystationError):
            return _reduced_error
        if kind.__name__ in MESSAGES.get(kind.__module__, ()):
            return _reduced_message
        if kind.__module__.partition(".")[0] != "numpy":  # whose scalars arrive as what they are
            for plain in (str, int, float, bytes):
                if issubclass(kind, plain):
                    return functools.partial(_reduced_to, plain)
        raise KeyError(kind)


def _reduced_to(plain: type, value: Any) -> Any:
    """Text and numbers of a program's own classes, such as members of its enumerations, as plain ones."""
    return plain, (plain.__getnewargs__(value)[0],)  # type: ignore[attr-defined]


def _reduced_message(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Enum):
        fields = [value.value]
    else:
        fields = [getattr(value, each.name) for each in dataclasses.fields(value) if not each.kw_only]
    return _message, (kind.__module__, kind.__name__, fields)


def _reduced_error(error: WaystationError) -> Any:
    """An error as one of Waystation's own classes, with plain context: the other end need not have others."""
    kind = next(each for each in type(error).__mro__ if each.__module__.startswith("waystation."))
    context = {
        key: each if type(each) in _PLAIN_CONTEXT else str(each) for key, each in error.context.items()
    }
    return _error, (kind.__module__, kind.__name__, str(error.message), context)


# In pickles these stand for the methods of `_Unpickler` that have their names.
def _array_at(name: str, shape: tuple[int, ...], start: int) -> np.ndarray[Any, Any]:
    raise NotImplementedError


def _message(module: str, name: str, fields: Sequence[Any]) -> Any:
    raise NotImplementedError


def _error(module: str, name: str, message: str, context: dict[str, Any]) -> WaystationError:
    raise NotImplementedError


_STAND_INS = {each.__name__ for each in (_array_at, _message, _error)}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, elements: memoryview, sender: str | None) -> None:
        super().__init__(file)
        self._elements = elements
        self._sender = sender

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        if module == __name__ and name in _STAND_INS:
            return getattr(self, name)
        if self._sender is not None and name not in _PLAIN.get(module, ()):
            raise self._refused(module, name)
        return super().find_class(module, name)

    def _message(self, module: str, name: str, fields: Sequence[Any]) -> Any:
        if name not in MESSAGES.get(module, ()):
            raise self._refused(module, name)
        return super().find_class(module, name)(*fields)

    def _error(self, module: str, name: str, message: str, context: dict[str, Any]) -> WaystationError:
        is_own = module.startswith("waystation.") and "__" not in module and "." not in name
        kind = super().find_class(module, name) if is_own else None
        if not (isinstance(kind, type) and issubclass(kind, WaystationError)):
            raise self._refused(module, name)
        return kind(message, **context)

    def _refused(self, module: str, name: str) -> Corrupt:
        own = f"{module}.{name}"
        return Corrupt(
            f"'{self._sender}' has sent '{own}'; the manager takes plain data and messages of Waystation",
            sender=self._sender,
            name=own,
        )

    def _array_at(self, name: str, shape: tuple[int, ...], start: int) -> np.ndarray[Any, Any]:
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
    pickler.dispatch_table = _Reductions(copyreg.dispatch_table | {np.ndarray: arrays.reduce})
    pickler.dump((new, objects))
    return file.getvalue(), arrays.found


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
