"""How the two ends of a connection prove to each other that they know the cluster's secret. No I/O.

The secret is never sent. Each end proves that it knows it over what both have said, the listener first, so
nobody who connects to a port that another has taken says anything to it. What has been said includes random
numbers of both, so a recorded proof is worth nothing, and the keys of every connection are its own.
Failures: whatever is not as it should be ends the connection (`Unavailable`); a stranger is not told why.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

from waystation._errors import InvalidInput, Unavailable

MAGIC = b"WSTMCTL1"
NONCE_BYTES = 32
PROOF_BYTES = 32
NAME_BYTES = 255
HELLO_BYTES = len(MAGIC) + NONCE_BYTES + 2 + NAME_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one connection, one for each direction.

    Attributes:
        to_listener: Signs what the connector says.
        to_connector: Signs what the listener says.
    """

    to_listener: bytes = field(repr=False)
    to_connector: bytes = field(repr=False)


class Connecting:
    """The end that connects.

    Args:
        name: What it is known by.
        secret: Of the cluster.
    """

    def __init__(self, name: str, secret: bytes) -> None:
        encoded = name.encode()
        if not 0 < len(encoded) <= NAME_BYTES:
            raise InvalidInput(f"a name has 1 to {NAME_BYTES} bytes, not {len(encoded)}: '{name}'")
        self._secret = secret
        padded = encoded.ljust(NAME_BYTES, b"\0")
        self.hello = MAGIC + secrets.token_bytes(NONCE_BYTES) + _LENGTH.pack(len(encoded)) + padded

    def answer(self, challenge: bytes) -> tuple[bytes, Keys]:
        """The proof for a challenge, and the keys.

        Raises:
            Unavailable: Whoever listens does not know the secret.
        """
        transcript = self.hello + challenge[:NONCE_BYTES]
        if not hmac.compare_digest(challenge[NONCE_BYTES:], _derived(self._secret, "listener", transcript)):
            raise Unavailable(
                "whoever listens at the controller's address does not know the cluster's secret"
            )
        return _derived(self._secret, "connector", transcript), _keys(self._secret, transcript)


class Accepting:
    """The end that listens.

    Args:
        secret: Of the cluster.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._transcript = b""
        self.name = ""

    def challenge(self, hello: bytes) -> bytes:
        """What answers a hello.

        Raises:
            Unavailable: It is none.
        """
        start = len(MAGIC) + NONCE_BYTES
        (length,) = _LENGTH.unpack_from(hello, start)
        field_ = hello[start + _LENGTH.size :]
        if not hello.startswith(MAGIC) or not 0 < length <= NAME_BYTES or any(field_[length:]):
            raise Unavailable("what has connected does not speak this protocol")
        try:
            self.name = field_[:length].decode()
        except UnicodeDecodeError:
            raise Unavailable("what has connected has no name") from None
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript = hello + nonce
        return nonce + _derived(self._secret, "listener", self._transcript)

    def accept(self, proof: bytes) -> Keys:
        """The keys.

        Raises:
            Unavailable: The proof is wrong.
        """
        if not hmac.compare_digest(proof, _derived(self._secret, "connector", self._transcript)):
            raise Unavailable(f"'{self.name}' does not know the cluster's secret")
        return _keys(self._secret, self._transcript)


def _keys(secret: bytes, transcript: bytes) -> Keys:
    return Keys(_derived(secret, "to listener", transcript), _derived(secret, "to connector", transcript))


def _derived(secret: bytes, purpose: str, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"waystation control " + purpose.encode() + b"\0" + transcript, hashlib.sha256)
