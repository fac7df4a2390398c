"""How the two ends of a connection prove to each other who they are. No I/O.

The controller has the cluster's secret, and issues a *credential* to each host and each program: a key that
is derived from the secret, a role and a name, and proves that role and that name alone. A program cannot
derive the key of a host, of another program, or the secret. The key is never sent. Each end proves that it
knows it over what both have said, the listener first, so nobody who connects to a port that another has taken
says anything to it. What has been said includes random numbers of both, so a recorded proof is worth nothing,
and the keys of every connection are its own.
Failures: whatever is not as it should be ends the connection (`Unavailable`); a stranger is not told why.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

from waystation._errors import InvalidInput, Unavailable

MAGIC = b"WSTMCTL2"
NONCE_BYTES = 32
PROOF_BYTES = 32
NAME_BYTES = 255
_ROLE_AND_LENGTH = struct.Struct("<BH")
HELLO_BYTES = len(MAGIC) + NONCE_BYTES + _ROLE_AND_LENGTH.size + NAME_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES


class Role(enum.IntEnum):
    """What the end that connects is.

    Attributes:
        HOST: A host of one epoch of an island: is told what to do, and tells what it has done.
        PROGRAM: A program: asks for what `waystation.runtime.cluster.calls` lists.
    """

    HOST = 1
    PROGRAM = 2


@dataclass(frozen=True, slots=True)
class Credential:
    """What proves who one end is.

    Attributes:
        role: Its role.
        name: Its name among those of that role.
        key: Of both.
    """

    role: Role
    name: str
    key: bytes = field(repr=False)


def issue(secret: bytes, role: Role, name: str) -> Credential:
    """The credential of a host or a program.

    Args:
        secret: Of the cluster; only the controller has it.
        role: What it is for.
        name: Likewise.

    Raises:
        InvalidInput: The name is too long, or empty.
    """
    encoded = name.encode()
    if not 0 < len(encoded) <= NAME_BYTES:
        raise InvalidInput(f"a name has 1 to {NAME_BYTES} bytes, not {len(encoded)}: '{name}'")
    return Credential(role, name, _derived(secret, f"key of {role.name.lower()}", encoded))


def key_between_hosts(secret: bytes) -> bytes:
    """What all hosts know, by which they prove themselves to each other; no program gets it."""
    return _derived(secret, "between hosts", b"")


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
        credential: What it proves itself by.
    """

    def __init__(self, credential: Credential) -> None:
        encoded = credential.name.encode()
        self._key = credential.key
        said = _ROLE_AND_LENGTH.pack(credential.role, len(encoded)) + encoded.ljust(NAME_BYTES, b"\0")
        self.hello = MAGIC + secrets.token_bytes(NONCE_BYTES) + said

    def answer(self, challenge: bytes) -> tuple[bytes, Keys]:
        """The proof for a challenge, and the keys.

        Raises:
            Unavailable: Whoever listens does not know the key.
        """
        transcript = self.hello + challenge[:NONCE_BYTES]
        if not hmac.compare_digest(challenge[NONCE_BYTES:], _derived(self._key, "listener", transcript)):
            raise Unavailable(
                "whoever listens at the controller's address does not know the cluster's secret"
            )
        return _derived(self._key, "connector", transcript), _keys(self._key, transcript)


class Accepting:
    """The end that listens.

    Args:
        secret: Of the cluster.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._transcript = b""
        self._claimed: Credential | None = None

    @property
    def name(self) -> str:
        """The name that the other end says that it has."""
        return "" if self._claimed is None else self._claimed.name

    @property
    def role(self) -> Role | None:
        """The role that it says that it has."""
        return None if self._claimed is None else self._claimed.role

    def challenge(self, hello: bytes) -> bytes:
        """What answers a hello.

        Raises:
            Unavailable: It is none.
        """
        start = len(MAGIC) + NONCE_BYTES
        role, length = _ROLE_AND_LENGTH.unpack_from(hello, start)
        padded = hello[start + _ROLE_AND_LENGTH.size :]
        is_framed = hello.startswith(MAGIC) and 0 < length <= NAME_BYTES and not any(padded[length:])
        if not is_framed or role not in set(Role):
            raise Unavailable("what has connected does not speak this protocol")
        try:
            name = padded[:length].decode()
        except UnicodeDecodeError:
            raise Unavailable("what has connected has no name") from None
        self._claimed = issue(self._secret, Role(role), name)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript = hello + nonce
        return nonce + _derived(self._claimed.key, "listener", self._transcript)

    def accept(self, proof: bytes) -> Keys:
        """The keys.

        Raises:
            Unavailable: The proof is wrong.
        """
        key = b"" if self._claimed is None else self._claimed.key
        if not key or not hmac.compare_digest(proof, _derived(key, "connector", self._transcript)):
            raise Unavailable(f"'{self.name}' has not proved that it is that")
        return _keys(key, self._transcript)


def _keys(key: bytes, transcript: bytes) -> Keys:
    return Keys(_derived(key, "to listener", transcript), _derived(key, "to connector", transcript))


def _derived(key: bytes, purpose: str, said: bytes) -> bytes:
    return hmac.digest(key, b"waystation control " + purpose.encode() + b"\0" + said, hashlib.sha256)
