"""What goes through the store: values in envelopes that say what they are, large ones in pieces.

An envelope is a line of JSON and, after it, the value, unless that is too large for one message: it then
lies in pieces beside, which were all put before the envelope. The line has `kind`; in the first round of a
session and for errors also `what` and `primary`, on which all processes have to agree; and `pieces`, how many
there are.

Invariant: whoever can read an envelope can read its pieces, until they are removed together with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from waystation._errors import Internal
from waystation.coordination.store import Store

PART, DECISION, FAILURE, DISAGREEMENT = "part", "decision", "failure", "disagreement"

# Parts up to this size travel inside their envelopes, all those of a round in one answer to the primary.
INLINE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Envelope:
    """An envelope as it was read.

    Attributes:
        kind: PART or DECISION; with an encoded error FAILURE, or DISAGREEMENT of processes out of step.
        content: The value, if it is in no pieces.
        pieces: How many pieces it is in.
        agreement: What its sender believes the session is for; empty in the parts of later rounds.
    """

    kind: str
    content: bytes
    pieces: int = 0
    agreement: dict[str, Any] = field(default_factory=dict)


def seal(
    store: Store, kind: str, value: bytes, piece_directory: str, agreement: dict[str, Any] | None = None
) -> tuple[bytes, list[str]]:
    """Makes the envelope of a value, and puts its pieces, if it takes any, into the store.

    Returns:
        The envelope, yet to be put, and the keys of the pieces.
    """
    line: dict[str, Any] = {"kind": kind, **(agreement or {})}
    keys: list[str] = []
    if len(value) > INLINE_BYTES and kind in (PART, DECISION):
        keys = piece_keys(piece_directory, -(-len(value) // store.message_bytes))
        view = memoryview(value)
        for index, key in enumerate(keys):
            begin = index * store.message_bytes
            store.set(key, bytes(view[begin : begin + store.message_bytes]))
        line["pieces"] = len(keys)
        value = b""
    return json.dumps(line).encode() + b"\n" + value, keys


def unseal(envelope: bytes) -> Envelope:
    """Reads an envelope, not its pieces."""
    line, _, content = envelope.partition(b"\n")
    try:
        fields = json.loads(line)
        kind, pieces = str(fields.pop("kind")), int(fields.pop("pieces", 0))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Internal(
            f"another process sent {len(envelope)} bytes that are not understood; "
            "check that all processes run the same version of Waystation"
        ) from None
    return Envelope(kind, content, pieces, fields)


def piece_keys(directory: str, count: int) -> list[str]:
    """The keys of the pieces of one value."""
    return [f"{directory}/{index}" for index in range(count)]


def content(store: Store, envelope: Envelope, directory: str) -> bytes | None:
    """The value of an envelope, from its pieces if it has any; None if these were removed meanwhile."""
    if not envelope.pieces:
        return envelope.content
    pieces = []
    for key in piece_keys(directory, envelope.pieces):
        piece = store.get(key, 0)
        if piece is None:
            return None
        pieces.append(piece)
    return b"".join(pieces)
