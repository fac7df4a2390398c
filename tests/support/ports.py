"""Ports for the processes that tests start, such that tests that run at the same time are given others.

A port that the system has picked is free again as soon as it is known, and may then become that of another
test, or the near end of any connection. So ports are taken from below those that the system picks, and
claimed by a name that all processes of this machine see, and that is free again when its holder ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_LOWEST = 10_000  # well-known services are below
_PICKED_BY_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextlib.contextmanager
def claimed_ports(count: int) -> Iterator[list[int]]:
    """Ports of this machine that nobody uses, and no other test gets meanwhile."""
    end = int(_PICKED_BY_SYSTEM.read_text().split()[0])
    # Each process begins elsewhere and goes on from there, so that a port is long closed when it comes again.
    begin = _LOWEST + (os.getpid() * 97 + next(_turns) * count) % (end - _LOWEST)
    with contextlib.ExitStack() as claims:
        ports: list[int] = []
        for port in itertools.chain(range(begin, end), range(_LOWEST, begin)):
            if len(ports) == count:
                break
            if _is_claimed(port, claims) and _is_free(port):
                ports.append(port)
        assert len(ports) == count, "no ports are free"
        yield ports


_turns = itertools.count()


def _is_claimed(port: int, claims: contextlib.ExitStack) -> bool:
    claim = claims.enter_context(socket.socket(socket.AF_UNIX))
    try:
        claim.bind(f"\0waystation-test-port-{port}")
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
