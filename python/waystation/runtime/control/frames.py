"""Frames: byte strings with a length and a tag, which nobody without the keys can make, repeat or reorder.

A tag is the keyed BLAKE2b of the frame's number in its direction, its length and its bytes. No I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator

from waystation._errors import Corrupt

TAG_BYTES = 16
_HEADER = struct.Struct("<Q")
_SIGNED = struct.Struct("<QQ")
_MOST_BYTES = 1 << 40
_COMPACT_BYTES = 1 << 20


class Sealer:
    """Makes frames of one direction.

    Args:
        key: Of the direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        """The frame of some bytes."""
        tag = _tag(self._key, self._number, body)
        self._number += 1
        return b"".join((_HEADER.pack(len(body)), tag, body))


class Opener:
    """Takes frames of one direction apart, however their bytes come.

    Args:
        key: Of the direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._buffer = bytearray()
        self._start = 0

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Takes bytes; gives the body of each frame that is whole.

        Memory is taken for what has come, never for what a length says.

        Raises:
            Corrupt: A frame is not what was sent.
        """
        self._buffer += received
        start = _HEADER.size + TAG_BYTES
        while len(self._buffer) - self._start >= start:
            (length,) = _HEADER.unpack_from(self._buffer, self._start)
            if length > _MOST_BYTES:
                raise Corrupt(f"a frame of control says that it has {length} bytes")
            at = self._start + start
            if len(self._buffer) < at + length:
                break
            body = bytes(memoryview(self._buffer)[at : at + length])
            tag = bytes(self._buffer[self._start + _HEADER.size : at])
            if not hmac.compare_digest(tag, _tag(self._key, self._number, body)):
                raise Corrupt(f"frame {self._number} of control is not what was sent")
            self._number += 1
            self._start = at + length
            yield body
        if self._start == len(self._buffer) or self._start > _COMPACT_BYTES:
            del self._buffer[: self._start]
            self._start = 0


def _tag(key: bytes, number: int, body: bytes) -> bytes:
    digest = hashlib.blake2b(_SIGNED.pack(number, len(body)), digest_size=TAG_BYTES, key=key)
    digest.update(body)
    return digest.digest()
