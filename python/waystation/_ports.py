"""Ports for processes that are told by others where they listen.

A port that the system picks is free again as soon as it is known. By the time a program listens there, it may
be that of another program, or the near end of any connection. So these ports are taken from below those that
the system picks.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from waystation._errors import Unavailable

_LOWEST = 10_000  # well-known services are below
_PICKED_BY_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PICKED_BY_DEFAULT = 32_768


def free_port() -> int:
    """A port of this machine that no process uses now, and that no caller of `claimed_ports` has.

    Raises:
        Unavailable: There is none.
    """
    with claimed_ports(1) as (port,):
        return port


@contextlib.contextmanager
def claimed_ports(count: int) -> Iterator[list[int]]:
    """Ports of this machine that no process uses, and that no other caller gets meanwhile.

    They are claimed by a name that all processes of this network namespace see. The claim ends with the
    `with` block, or with the process.

    Raises:
        Unavailable: There are not so many free ones.
    """
    end = _first_picked_by_system()
    # Each call begins elsewhere, so that a port is long closed when it comes again.
    begin = _LOWEST + secrets.randbelow(end - _LOWEST)
    with contextlib.ExitStack() as claims:
        ports: list[int] = []
        for port in itertools.chain(range(begin, end), range(_LOWEST, begin)):
            if len(ports) == count:
                break
            if _is_claimed(port, claims) and _is_free(port):
                ports.append(port)
        if len(ports) < count:
            raise Unavailable(
                f"{count} ports are needed, and of {_LOWEST} to {end - 1} only {len(ports)} are free; "
                "end programs that listen there"
            )
        yield ports


def _first_picked_by_system() -> int:
    """The first of the ports that the system gives to those that ask for any."""
    try:
        first = int(_PICKED_BY_SYSTEM.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    return first if first >= 2 * _LOWEST else _FIRST_PICKED_BY_DEFAULT


def _is_claimed(port: int, claims: contextlib.ExitStack) -> bool:
    claim = claims.enter_context(socket.socket(socket.AF_UNIX))
    try:
        claim.bind(f"\0waystation-port-{port}")
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
