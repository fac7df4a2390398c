"""Hosts on one machine: each has namespaces of its own (`waystation_demo.memory_tier.namespaces`), and an
address on a common bridge.

Links can be pulled (`Host.unplug`), lose in silence what goes one way (`Host.lose_what_goes_to`), or be slow
(`Host.throttle`). What changes or delays bytes on the way is `tests.memory.proxy`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from waystation_demo.memory_tier import namespaces
from waystation_demo.memory_tier.namespaces import HANG_S, Namespaces, Started, wait_until

__all__ = ["HANG_S", "Host", "Network", "Started", "enter", "network_of", "why_forbidden"]

_NETWORK = "10.77.0"
_BRIDGE = 254  # the last byte of the bridge's own address, where programs between hosts listen
_DEAD_LINK = "02:00:00:00:00:ff"  # nobody has this address on the bridge


@functools.cache
def why_forbidden() -> str | None:
    """Why there can be no such hosts here; None if there can be."""
    return namespaces.why_forbidden("tc qdisc add dev one root tbf rate 1mbit burst 9k latency 9ms")


class Host:
    """One of the hosts of a network.

    Attributes:
        name: Of the host.
        address: Where others reach it.
        losses: How often it has been lost.
    """

    def __init__(self, network: Network, index: int) -> None:
        self.name = f"host{index}"
        self.address = f"{_NETWORK}.{index + 1}"
        self.losses = 0
        self._network = network
        self._index = index
        self._namespace: Namespaces | None = None

    @property
    def is_lost(self) -> bool:
        """Whether there is no such host now."""
        return self._namespace is None

    @property
    def inside(self) -> Namespaces:
        """Its namespaces."""
        assert self._namespace is not None, f"{self.name} is lost"
        return self._namespace

    def bring_up(self) -> None:
        """Brings up the host, or another one in its place: of the same address, with nothing in memory."""
        assert self._namespace is None
        made = Namespaces(self._network.memory_bytes)
        link, hardware = f"port{self._index}", f"02:00:00:00:00:{self._index + 1:02x}"
        try:
            # The kernel takes the old port away some time after the host that it led to.
            switch = self._network.switch
            wait_until(lambda: f"{link}@" not in switch.network("ip", "-brief", "link"))
            switch.configure(
                f"link add {link} type veth peer name eth0 netns {made.init} address {hardware}",
                f"link set {link} master bridge up",
            )
            made.configure(f"address add {self.address}/24 dev eth0", "link set eth0 up")
        except BaseException:
            made.kill()
            raise
        self._namespace = made

    def lose(self) -> None:
        """Loses the host: SIGKILL to every process, and nothing of its memory is left."""
        self.inside.kill()
        self._namespace = None
        self.losses += 1

    def start(self, command: Sequence[object], **options: Any) -> Started:
        """Starts a command on the host, with the options of `subprocess.Popen`."""
        return self.inside.start(command, **options)

    def run(self, *command: object) -> str:
        """Runs a command on the host that has to succeed; returns what it says."""
        return self.inside.run(*command)

    def outside(self, path: Path) -> Path:
        """The path by which a test reaches what has `path` on the host."""
        return self.inside.outside(path)

    def unplug(self) -> None:
        """Pulls the host's cable."""
        self._network.switch.configure(f"link set port{self._index} down")

    def plug_in(self) -> None:
        """Puts it back."""
        self._network.switch.configure(f"link set port{self._index} up")

    def lose_what_goes_to(self, other: Host) -> None:
        """Loses, without a word, all that this host sends to another; what that one sends arrives."""
        self.inside.configure(f"neigh replace {other.address} lladdr {_DEAD_LINK} dev eth0 nud permanent")

    def find(self, other: Host) -> None:
        """Ends that."""
        self.inside.configure(f"neigh del {other.address} dev eth0")

    def throttle(self, bytes_per_s: int | None) -> None:
        """Has the link carry so much in each direction, or as much as it can."""
        for namespace, device in ((self.inside, "eth0"), (self._network.switch, f"port{self._index}")):
            namespace.network("sh", "-c", f"tc qdisc delete dev {device} root 2>/dev/null || true")
            if bytes_per_s is not None:
                # A burst must hold the largest packet that the link sees, which offloading makes 64 KiB long.
                limit = f"tbf rate {8 * bytes_per_s}bit burst 128kb latency 400ms"
                namespace.network("tc", "qdisc", "add", "dev", device, "root", *limit.split())

    def sent_bytes(self) -> int:
        """What has gone out of the host since it came up."""
        (link,) = json.loads(self.inside.network("ip", "-json", "-statistics", "link", "show", "eth0"))
        return int(link["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Lets nothing of it be left."""
        if self._namespace is not None:
            self.lose()


class Network:
    """Hosts on one bridge.

    Attributes:
        hosts: All of them, lost or not.
        memory_bytes: What each can keep in memory.
        address: The bridge's own.
        switch: The namespaces of the bridge, where programs can run that lie between hosts.
    """

    address = f"{_NETWORK}.{_BRIDGE}"

    def __init__(self, count: int, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.switch = Namespaces(1 << 20)
        self.hosts = [Host(self, index) for index in range(count)]

    def start_between(self, command: Sequence[object], **options: Any) -> Started:
        """Starts a command that all hosts reach at `address`."""
        return self.switch.start(command, **options)

    def bring_up(self) -> None:
        """Brings up the bridge and all hosts."""
        self.switch.configure(
            "link add bridge type bridge", f"address add {self.address}/24 dev bridge", "link set bridge up"
        )
        for host in self.hosts:
            host.bring_up()

    def close(self) -> None:
        """Lets nothing be left."""
        for host in self.hosts:
            host.close()
        self.switch.kill()


@contextlib.contextmanager
def network_of(count: int, memory_bytes: int = 256 << 20) -> Iterator[Network]:
    """Hosts that are up, for as long as the block runs."""
    network = Network(count, memory_bytes)
    try:
        network.bring_up()
        yield network
    finally:
        network.close()


def enter(init: int) -> None:
    """Goes on in a child within the namespaces whose first process is `init`; ends as the child does."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    wanted = 0x00020000 | 0x20000000 | 0x40000000  # CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET
    namespaces = os.pidfd_open(init)
    if library.setns(namespaces, wanted) != 0:
        raise OSError(ctypes.get_errno(), "the namespaces of the host cannot be entered")
    os.close(namespaces)
    ended, own = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(own)
        library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.set_blocking(ended, False)
        with contextlib.suppress(BlockingIOError):
            if os.read(ended, 1) == b"":  # the parent has died before that took effect
                os._exit(1)
        os.close(ended)
        return
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # there is no handler of SIGKILL to be taken away
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
