"""Packs what is told: mostly integers, a few objects that are the same each time, now and then a large one.

A *pack* has words (64-bit integers), and objects to which words refer by number. An object that is said to be
`known` travels once for each connection, the first time that it is referred to; others travel in the pack
that refers to them. So a few words tell a host to run a list once more, and nothing is pickled.
Packs are unpacked in the order in which they were packed. Objects are unpickled: only what has come over a
connection whose other end has proved itself may be unpacked. No I/O.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from collections.abc import Hashable, Sequence
from typing import Any

from waystation._errors import Corrupt

# When so many are known, both ends forget all of them.
MOST_KNOWN = 1 << 13

_HEADER = struct.Struct("<BQQ")
_WORD_BYTES = 8


class Packer:
    """One direction of a connection; makes one pack after the other.

    Attributes:
        words: What has been said in the pack that is being made.
    """

    def __init__(self) -> None:
        self.words = array("q")
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
        self.words.append(len(values))
        self.words.extend(values)

    def take(self) -> bytes:
        """The pack; another begins."""
        said = pickle.dumps((self._new, self._objects), 5) if self._new or self._objects else b""
        header = _HEADER.pack(self._forget, len(self.words), len(said))
        packed = b"".join((header, self.words.tobytes(), said))
        self._forget = len(self._known) >= MOST_KNOWN
        if self._forget:
            self._known.clear()
        self.words = array("q")
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
        forget, words, said = _HEADER.unpack_from(packed)
        start = _HEADER.size
        middle = start + words * _WORD_BYTES
        if len(packed) != middle + said:
            raise Corrupt(f"a pack of control has {len(packed)} bytes, and says {middle + said}")
        if forget:
            self._known = []
        new, objects = _unpickled(memoryview(packed)[middle:]) if said else ((), ())
        self._known += new
        numbers = array("q")
        numbers.frombytes(memoryview(packed)[start:middle])
        return Pack(numbers, self._known, objects)


def _unpickled(said: memoryview) -> tuple[list[Any], list[Any]]:
    found: tuple[list[Any], list[Any]] = pickle.loads(said)  # noqa: S301 the other end has proved itself
    return found


class Pack:
    """What a pack says, read from its beginning.

    Args:
        words: Its words.
        known: Objects by the numbers of `Packer.known`.
        objects: Objects by those of `Packer.object`.
    """

    def __init__(self, words: array[int], known: Sequence[Any], objects: Sequence[Any]) -> None:
        self._words = words
        self._known = known
        self._objects = objects
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether all words have been read."""
        return self._at >= len(self._words)

    def word(self) -> int:
        """The next word."""
        self._at += 1
        return self._words[self._at - 1]

    def numbers(self) -> tuple[int, ...]:
        """The next integers, as `Packer.numbers` has said them."""
        count = self.word()
        start, self._at = self._at, self._at + count
        return tuple(self._words[start : self._at])

    def known(self) -> Any:
        """What the next word refers to, of objects that are known."""
        return self._known[self.word()]

    def object(self) -> Any:
        """What the next word refers to, of those of this pack."""
        return self._objects[self.word()]

    def optional_object(self) -> Any:
        """What the next word refers to, of those of this pack; None where it is -1."""
        number = self.word()
        return None if number < 0 else self._objects[number]
