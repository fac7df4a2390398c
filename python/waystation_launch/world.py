"""The processes of a program over its hosts, and what each is told of its place among them.

Processes are numbered host by host. Where a launch starts those of one host, the launches of the others start
the rest, and all meet at the first host, at ports that were said beforehand.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """All processes of the program.

    Attributes:
        host_count: How many hosts.
        per_host: How many processes each has.
        own_hosts: The hosts whose processes are started here.
        address: Where they meet.
        jax_port: The port at which they do, with JAX.
        torch_port: The port at which they do, with torch.
    """

    host_count: int
    per_host: int
    own_hosts: Sequence[int]
    address: str
    jax_port: int
    torch_port: int

    @property
    def first_index(self) -> int:
        """The number of the first process that is started here."""
        return self.own_hosts[0] * self.per_host

    def environments(self, base: Mapping[str, str], *, jax: bool, torch: bool) -> list[dict[str, str]]:
        """What each process that is started here is told, in their order.

        Args:
            base: What all are told.
            jax: Whether to set what JAX reads.
            torch: Whether to set what torch reads.
        """
        return [
            {**base, **self._environment(host, local, jax=jax, torch=torch)}
            for host in self.own_hosts
            for local in range(self.per_host)
        ]

    def _environment(self, host: int, local: int, *, jax: bool, torch: bool) -> dict[str, str]:
        index, count = host * self.per_host + local, self.host_count * self.per_host
        told = {
            # Or the last lines of a process that is killed would stay in its buffer.
            "PYTHONUNBUFFERED": "1",
            "WAYSTATION_PROCESS_COUNT": str(count),
            "WAYSTATION_PROCESS_INDEX": str(index),
        }
        if jax:
            told["JAX_COORDINATOR_ADDRESS"] = f"{self.address}:{self.jax_port}"
        if torch:
            told |= {
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(self.torch_port),
                "WORLD_SIZE": str(count),
                "RANK": str(index),
                "LOCAL_WORLD_SIZE": str(self.per_host),
                "LOCAL_RANK": str(local),
            }
        return told


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [int(opened.getsockname()[1]) for opened in sockets]
