"""The hosts of the demo, all on this machine: made of namespaces where that is allowed, else of directories.

A host has a name, an address at which the others reach it, and memory in which its agent keeps its store. It
is lost as a whole: SIGKILL to every process on it, and its memory is gone. Another one then takes its place,
with its name and address and nothing in memory. Invariant: no process of a host outlives the block that made
it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from waystation import _native
from waystation._ports import free_port
from waystation.errors import WaystationError
from waystation_demo.memory_tier.namespaces import Namespaces, wait_until, why_forbidden

MEMORY_BYTES = 512 << 20  # of each host
_NETWORK, _PORT, _FIRST_PORT = "10.78.0", 7700, 29500


class Hosts(ABC):
    """So many hosts.

    Attributes:
        kind: What they are, for people.
        names: Of each.
        addresses: Where each is reached by the others.
        ports: Where the agent of each listens.
        first_port: Where the processes of all hosts meet at the first, and the port after it.
        interface: The network interface of each.
        stores: The directory of each one's agent, as its own processes see it.
    """

    kind: str
    interface: str
    addresses: list[str]
    ports: list[int]
    first_port: int
    stores: list[Path]

    def __init__(self, count: int) -> None:
        self.names = [f"host-{index}" for index in range(count)]

    @abstractmethod
    def start(self, index: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a command on a host, with the options of `subprocess.Popen`."""

    @abstractmethod
    def seen(self, index: int, path: Path) -> Path:
        """The path by which this process reaches what has `path` on a host."""

    @abstractmethod
    def lose(self, index: int) -> None:
        """Loses a host; returns when nothing of it is left."""

    @abstractmethod
    def replace(self, index: int) -> None:
        """Brings up another host in the place of one that is lost."""

    @abstractmethod
    def close(self) -> None:
        """Lets nothing be left."""

    def agent(self, index: int) -> _native.AgentClient:
        """Asks the agent of a host."""
        return _native.AgentClient(str(self.seen(index, self.stores[index])), timeout_s=10.0)


class NamespaceHosts(Hosts):
    """Hosts with a network, mounts, process ids and memory of their own."""

    kind = "namespaces: a network, process ids, mounts and memory of its own for each"
    interface = "eth0"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.addresses = [f"{_NETWORK}.{index + 1}" for index in range(count)]
        self.ports, self.first_port = [_PORT] * count, _FIRST_PORT
        self.stores = [Path("/dev/shm/agent")] * count
        self._switch = Namespaces(1 << 20)
        self._hosts: list[Namespaces | None] = [None] * count
        try:
            self._switch.configure("link add bridge type bridge", "link set bridge up")
            for index in range(count):
                self.replace(index)
        except BaseException:
            self.close()
            raise

    def _host(self, index: int) -> Namespaces:
        host = self._hosts[index]
        assert host is not None, f"{self.names[index]} is lost"
        return host

    def start(self, index: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """See `Hosts`."""
        return self._host(index).start(command, **options).entered

    def seen(self, index: int, path: Path) -> Path:
        """See `Hosts`."""
        return self._host(index).outside(path)

    def lose(self, index: int) -> None:
        """See `Hosts`."""
        self._host(index).kill()
        self._hosts[index] = None

    def replace(self, index: int) -> None:
        """See `Hosts`."""
        link = f"port{index}"
        # The kernel takes the old port away some time after the host that it led to.
        wait_until(lambda: f"{link}@" not in self._switch.network("ip", "-brief", "link"))
        host = self._hosts[index] = Namespaces(MEMORY_BYTES)
        hardware = f"02:00:00:00:00:{index + 1:02x}"  # as before, since others remember it
        self._switch.configure(
            f"link add {link} type veth peer name eth0 netns {host.init} address {hardware}",
            f"link set {link} master bridge up",
        )
        host.configure(f"address add {self.addresses[index]}/24 dev eth0", "link set eth0 up")

    def close(self) -> None:
        """See `Hosts`."""
        for host in [*self._hosts, self._switch]:
            if host is not None:
                host.kill()


class DirectoryHosts(Hosts):
    """Hosts that share all of this machine but a directory in memory and an address."""

    kind = "directories in memory and loopback addresses: processes and network are shared"
    interface = "lo"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.addresses = [f"127.0.0.{2 + index}" for index in range(count)]
        self.ports = [free_port() for _ in self.addresses]
        self.first_port = free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="waystation-demo-", dir="/dev/shm"))
        self.stores = [self._directory / name / "agent" for name in self.names]
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        for index in range(count):
            self.replace(index)

    def start(self, index: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """See `Hosts`."""
        self._started[index] = subprocess.Popen(command, **options)
        return self._started[index]

    def seen(self, index: int, path: Path) -> Path:
        """See `Hosts`."""
        return path

    def lose(self, index: int) -> None:
        """See `Hosts`."""
        started = self._started.pop(index, None)
        processes = set(self._agents(index))
        if started is not None and started.poll() is None:
            started.send_signal(signal.SIGSTOP)  # it is to start nothing again
            children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
            processes |= {started.pid, *map(int, children.split())}
        ends = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                ends.append(os.pidfd_open(process))
                signal.pidfd_send_signal(ends[-1], signal.SIGKILL)
        for end in ends:
            select.select([end], [], [])
            os.close(end)
        if started is not None:
            started.wait()
        shutil.rmtree(self.stores[index].parent)

    def _agents(self, index: int) -> Iterator[int]:
        with contextlib.suppress(WaystationError):
            yield int(_native.AgentClient(str(self.stores[index]), timeout_s=0.0).status()["process"])

    def replace(self, index: int) -> None:
        """See `Hosts`."""
        self.stores[index].parent.mkdir(mode=0o700)

    def close(self) -> None:
        """See `Hosts`."""
        for index in range(len(self.names)):
            if self.stores[index].parent.exists():
                self.lose(index)
        shutil.rmtree(self._directory)


@contextlib.contextmanager
def hosts_of(count: int, *, are_shared: bool | None = None) -> Iterator[Hosts]:
    """Hosts that are up, for as long as the block runs.

    Args:
        count: How many.
        are_shared: Whether they are directories only; None decides by what is allowed here.
    """
    if are_shared is None:
        are_shared = why_forbidden() is not None
    hosts: Hosts = DirectoryHosts(count) if are_shared else NamespaceHosts(count)
    try:
        yield hosts
    finally:
        hosts.close()
