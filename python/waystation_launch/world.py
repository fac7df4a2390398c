"""The processes of a program on its hosts, and the environment that tells each its place among them.

Processes are numbered host by host. If a launch starts the processes of one host, the launches of the other
hosts start the rest, and all processes meet at the first host, at ports that the options give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LOCAL_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class World:
    """All processes of the program.

    Attributes:
        host_count: The number of hosts.
        per_host: The number of processes on each host.
        own_hosts: The hosts whose processes this launch starts.
        address: The address at which the processes meet.
        jax_port: The port for JAX there.
        torch_port: The port for torch there.
    """

    host_count: int
    per_host: int
    own_hosts: Sequence[int]
    address: str
    jax_port: int
    torch_port: int

    @property
    def first_index(self) -> int:
        """The number of the first process that this launch starts."""
        return self.own_hosts[0] * self.per_host

    def environments(self, base: Mapping[str, str], *, jax: bool, torch: bool) -> list[dict[str, str]]:
        """The environment of each process that this launch starts, in their order.

        Args:
            base: The variables that all have in common.
            jax: Whether to set the variables of JAX.
            torch: Whether to set the variables of torch.
        """
        return [
            {**base, **self._environment(host, local, jax=jax, torch=torch)}
            for host in self.own_hosts
            for local in range(self.per_host)
        ]

    def _environment(self, host: int, local: int, *, jax: bool, torch: bool) -> dict[str, str]:
        index, count = host * self.per_host + local, self.host_count * self.per_host
        told = {
            # Otherwise the last lines of a process that is killed would stay in its buffer.
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
