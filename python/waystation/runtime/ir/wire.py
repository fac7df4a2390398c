"""Programs as bytes: what is sent, and what a program is known by.

A fixed-width, self-describing encoding of the classes of this package. Integers take 8 bytes whatever their
value, so the bytes of a program in the high form do not depend on the number of shards. Reading builds only
the classes that are listed here, and runs nothing. Invariant: `decode(encode(x)) == x`; equal programs have
equal bytes, on every host and in every process.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields
from typing import Any

from waystation._errors import Corrupt, WaystationError
from waystation.runtime.devices import DeviceId
from waystation.runtime.ir import low, program
from waystation.runtime.ir.shardings import Sharding
from waystation.runtime.resources import Placement

# The number of a class is its place here: add at the end only.
_CLASSES: tuple[type[Any], ...] = (
    program.Program,
    program.SliceShape,
    program.Value,
    Sharding,
    program.Arg,
    program.Compute,
    program.HostCall,
    program.Reshard,
    program.Free,
    program.Result,
    low.LowProgram,
    low.HostProgram,
    low.Exec,
    low.Send,
    low.Recv,
    low.Copy,
    low.Free,
    Placement,
    DeviceId,
)
_NUMBERS = {cls: number for number, cls in enumerate(_CLASSES)}
_FIELDS = [tuple(field.name for field in fields(cls)) for cls in _CLASSES]
# What reading damaged bytes can come to, and making a class of the wrong values.
_DAMAGE = (struct.error, LookupError, ValueError, TypeError, AttributeError, RecursionError, WaystationError)
_COUNT = struct.Struct("<I")
_INTEGER = struct.Struct("<q")


def encode(value: program.Program | low.LowProgram | low.HostProgram) -> bytes:
    """The bytes of a program."""
    encoder = _Encoder()
    encoder.add(value)
    return b"".join(encoder.parts)


def decode(data: bytes) -> Any:
    """What was encoded.

    Raises:
        Corrupt: These are no bytes of a program.
    """
    decoder = _Decoder(data)
    try:
        found = decoder.take()
    except _DAMAGE as error:
        raise Corrupt(f"the bytes of a program are damaged near {decoder.at}: {error}") from error
    if decoder.at != len(data):
        raise Corrupt(f"the bytes of a program go on after its end at {decoder.at}")
    return found


def fingerprint(value: program.Program | low.LowProgram | low.HostProgram) -> str:
    """What a program is known by: the SHA-256 of its bytes, in hexadecimal."""
    return hashlib.sha256(encode(value)).hexdigest()


class _Encoder:
    """Writes each distinct sharding once; later ones are its number."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._shardings: dict[Sharding, int] = {}

    def add(self, value: Any) -> None:
        """Appends a value."""
        if isinstance(value, bool):
            self.parts.append(b"T" if value else b"F")
        elif isinstance(value, int):
            self.parts.append(b"i" + _INTEGER.pack(value))
        elif isinstance(value, str):
            text = value.encode()
            self.parts += [b"s", _COUNT.pack(len(text)), text]
        elif isinstance(value, tuple):
            self.parts += [b"t", _COUNT.pack(len(value))]
            for item in value:
                self.add(item)
        elif isinstance(value, Sharding) and value in self._shardings:
            self.parts.append(b"#" + _COUNT.pack(self._shardings[value]))
        else:
            number = _NUMBERS[type(value)]
            self.parts.append(b"c" + bytes([number]))
            for name in _FIELDS[number]:
                self.add(getattr(value, name))
            if isinstance(value, Sharding):
                self._shardings[value] = len(self._shardings)


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data
        self._shardings: list[Sharding] = []

    def take(self) -> Any:
        """Reads a value."""
        mark = self._bytes(1)
        if mark in (b"T", b"F"):
            return mark == b"T"
        if mark == b"i":
            return _INTEGER.unpack(self._bytes(_INTEGER.size))[0]
        if mark == b"s":
            return self._bytes(self._count()).decode()
        if mark == b"t":
            return tuple([self.take() for _ in range(self._count())])
        if mark == b"#":
            return self._shardings[self._count()]
        if mark != b"c":
            raise LookupError(f"{mark!r} marks nothing")
        number = self._bytes(1)[0]
        made = _CLASSES[number](*[self.take() for _ in _FIELDS[number]])
        if isinstance(made, Sharding):
            self._shardings.append(made)
        return made

    def _count(self) -> int:
        return int(_COUNT.unpack(self._bytes(_COUNT.size))[0])

    def _bytes(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            raise LookupError("they end too early")
        taken, self.at = self._data[self.at : end], end
        return taken
