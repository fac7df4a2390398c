"""Chains: computations that follow each other on one slice, as the code of one.

A chain says which functions are called in turn, and what each is given. It becomes bytes, with the code of
its functions in them, so that hosts get it like the code of any function, know it by its hash, and compile it
as a whole. Nothing here knows what the code of a function is. The bytes are `MAGIC`, the length of the text
that follows (4 bytes, little-endian), that text (JSON), and the code of all functions, one after the other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from waystation._errors import Corrupt

MAGIC = b"waystation chain\0"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ChainCall:
    """One call of a chain.

    Attributes:
        function: The place of the function in the chain's.
        operands: What it is given: numbers of values, which count the operands of the chain first, and then
            the results of all calls in turn.
    """

    function: int
    operands: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """See above.

    Attributes:
        label: A name for people.
        functions: The keys of the functions, each once.
        operand_count: How many arrays it is given.
        calls: The calls, in order.
        results: The numbers of the values that it gives back.
    """

    label: str
    functions: tuple[str, ...]
    operand_count: int
    calls: tuple[ChainCall, ...]
    results: tuple[int, ...]

    def encoded(self, code: Mapping[str, bytes]) -> bytes:
        """Its bytes.

        Args:
            code: The code of its functions, by key.
        """
        parts = [code[key] for key in self.functions]
        said = {
            "label": self.label,
            "functions": [[key, len(part)] for key, part in zip(self.functions, parts, strict=True)],
            "operands": self.operand_count,
            "calls": [[call.function, *call.operands] for call in self.calls],
            "results": self.results,
        }
        text = json.dumps(said, separators=(",", ":")).encode()
        return b"".join((MAGIC, _LENGTH.pack(len(text)), text, *parts))


def is_chain(code: bytes) -> bool:
    """Whether the code of a function is that of a chain."""
    return code.startswith(MAGIC)


def decode_chain(encoded: bytes) -> tuple[Chain, tuple[bytes, ...]]:
    """A chain, and the code of its functions, of its bytes.

    Raises:
        Corrupt: These are no bytes of a chain.
    """
    try:
        (length,) = _LENGTH.unpack_from(encoded, len(MAGIC))
        at = len(MAGIC) + _LENGTH.size
        said = json.loads(encoded[at : at + length])
        at += length
        parts = []
        for _, size in said["functions"]:
            parts.append(encoded[at : at + size])
            at += size
        calls = tuple(ChainCall(function, tuple(operands)) for function, *operands in said["calls"])
        keys = tuple(key for key, _ in said["functions"])
        chain = Chain(said["label"], keys, said["operands"], calls, tuple(said["results"]))
    except (struct.error, ValueError, LookupError, TypeError) as error:
        raise Corrupt(f"the bytes of a chain of computations are damaged: {error}") from error
    if not is_chain(encoded) or at != len(encoded):
        raise Corrupt("the bytes of a chain of computations are damaged: they have another length")
    return chain, tuple(parts)
