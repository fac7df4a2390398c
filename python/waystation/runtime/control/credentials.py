"""What the two ends of a connection of control prove who they are by.

The controller has the cluster's secret, and issues a *credential* to each host and each program: a private
key that is made from the secret for one role and one name, and the public key of the controller. A program
cannot make the key of a host, of another program, or of the controller. TLS proves the keys, the controller's
first, so nobody who connects to a port that another has taken says anything to it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from waystation import _native

# A message has at most so many bytes; memory is taken for what has come, never for a length that is claimed.
MOST_BYTES = 1 << 40
# The name of the controller, and the run, in the first message of those who connect: each cluster has keys of
# its own, so it needs no other name.
CONTROLLER, RUN = "controller", bytes(16)


class Role(enum.StrEnum):
    """What the end that connects is.

    Attributes:
        HOST: A host of one epoch of an island: is told what to do, and tells what it has done.
        PROGRAM: A program: asks for what `waystation.runtime.cluster.calls` lists.
    """

    HOST = "host"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class Credential:
    """What proves who one end is, and by what it knows the controller.

    Attributes:
        role: Its role.
        name: Its name among those of that role.
        key: The private key of both.
        controller: The public key of the controller.
    """

    role: Role
    name: str
    key: bytes = field(repr=False)
    controller: bytes = field(repr=False)


def issue(secret: bytes, role: Role, name: str) -> Credential:
    """The credential of a host or a program.

    Args:
        secret: Of the cluster; only the controller has it.
        role: What it is for.
        name: Likewise.

    Raises:
        InvalidInput: The name is too long, or empty.
    """
    return Credential(role, name, *_native.issue_peer_key(secret, role, name))


def key_between_hosts(secret: bytes) -> bytes:
    """What all hosts know, by which they prove themselves to each other; no program gets it."""
    return _native.derive_peer_secret(secret, "between hosts")
