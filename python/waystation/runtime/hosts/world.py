"""Makes a process a host: its devices, its place in the `jax.distributed` world of its island, its end.

A world has no fixed ports: the first host looks for a free one, and if another process takes that meanwhile,
the island is built once more. After `jax.distributed.initialize` a process ignores SIGTERM, so hosts are
ended by SIGKILL; they die with the process that has started them too, so that none is ever left over, not
even a stopped one.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

from waystation._errors import Unavailable
from waystation._ports import free_port
from waystation._threads import processor_count
from waystation.runtime.control.credentials import Credential

_THREADS_VARIABLE = "PJRT_NPROC"
_DEVICES_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S*")
_PR_SET_PDEATHSIG = 1
_JOIN_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class World:
    """What a host must know to be one of its island.

    Attributes:
        coordinator: Address of the coordination service, which the first host runs; empty if it is alone.
        index: The number of the host in its island.
        count: How many hosts the island has.
        devices_per_host: How many devices each has.
        kind: `cpu`, whose devices share the memory of the host, or `gpu`.
        secret: What all hosts of the cluster know, by which they prove themselves to each other.
        controller: Where the controller listens.
        credential: What this host proves itself by to the controller.
    """

    coordinator: str
    index: int
    count: int
    devices_per_host: int
    kind: str
    secret: bytes = field(repr=False)
    controller: str
    credential: Credential


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as the machine that it runs on knows it.

    Attributes:
        process_id: Its id.
        start: When it started, in ticks since the machine did: tells it from a later one of the same id.
    """

    process_id: int
    start: str

    @classmethod
    def own(cls) -> Process:
        """This one."""
        return cls(os.getpid(), _start(os.getpid()))

    def kill(self) -> None:
        """Ends it, if it is still there; only on its own machine."""
        try:
            if _start(self.process_id) == self.start:
                os.kill(self.process_id, signal.SIGKILL)
        except (OSError, IndexError):
            pass  # it has ended already


def name_in(epoch: int, host: str) -> str:
    """What a host of an epoch is known by to others: one that comes later has another name."""
    return f"{host}/e{epoch}"


def die_with_parent() -> None:
    """Has the kernel kill this process when the one that has started it ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise Unavailable(f"a host cannot be tied to its parent process: {os.strerror(code)}", errno=code)
    if os.getppid() != parent:  # it ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def free_address(host: str) -> str:
    """An address at which nothing listens now."""
    return f"{host}:{free_port()}"


def join(world: World) -> None:
    """Sets up JAX in this process: its devices, and the other hosts.

    Raises:
        Unavailable: The host has not as many devices as it should have.
    """
    # What the program has set for itself; each host has as many devices as it is told.
    os.environ["XLA_FLAGS"] = _DEVICES_FLAG.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    os.environ["JAX_PLATFORMS"] = "cuda" if world.kind == "gpu" else world.kind
    import jax

    # Blocks of 64-bit dtypes would silently become others; functions name the dtypes that they work in.
    jax.config.update("jax_enable_x64", True)
    if world.kind == "cpu":
        jax.config.update("jax_num_cpu_devices", world.devices_per_host)
        os.environ[_THREADS_VARIABLE] = str(_threads(world.devices_per_host))
    if world.count > 1:
        jax.distributed.initialize(
            world.coordinator,
            world.count,
            world.index,
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_TIMEOUT_S,
        )
    found = len(jax.local_devices())
    if found != world.devices_per_host:
        raise Unavailable(f"host {world.index} has {found} devices, not {world.devices_per_host}")


def _threads(devices: int) -> int:
    """How many threads XLA has for computations on the devices of CPUs.

    A collective keeps one for each device until all hosts have begun it. With no more than these, a
    computation that another host needs before it can begin would never get one. XLA begins one collective
    after the other, and has by default as many threads as there are cores.
    """
    given = os.environ.get(_THREADS_VARIABLE, "")
    return devices + (int(given) if given.isdecimal() else processor_count())


def _start(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[19]
