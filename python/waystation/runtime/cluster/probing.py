"""Whether anything listens where a cluster is said to be: asked before Ray is, which tries for a minute.

Ray takes 127.0.0.1 and `localhost` for "this machine, as others see it", and connects there, so that is what
is asked.
"""

from __future__ import annotations

import os
import socket

from waystation._errors import Unavailable

TIMEOUT_S = 5.0
_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "::1"})
_OF_THIS_MACHINE = "RAY_ADDRESS"  # where `auto` looks first


def require_listener(address: str, timeout_s: float = TIMEOUT_S) -> None:
    """Returns if something listens at an address; one that is no `HOST:PORT` is left to Ray.

    Args:
        address: As `connect` takes it.
        timeout_s: How long to wait for an answer.

    Raises:
        Unavailable: Nothing listens there.
    """
    told = os.environ.get(_OF_THIS_MACHINE, "") if address == "auto" else address
    host, _, port = told.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or "/" in host:
        return
    taken, where = host, f"'{told}'"
    if host in _THIS_MACHINE:
        taken = _own_address()
        where += f" ({taken}:{port}: Ray takes '{host}' for the address by which others see this machine)"
    try:
        socket.create_connection((taken, int(port)), timeout_s).close()
    except (OSError, OverflowError) as error:
        why = f"no answer in {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise Unavailable(
            f"there is no Ray cluster at {where}: nothing listens there ({why}); start one, or take the "
            "address that a program's cluster.address shows"
        ) from None


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
