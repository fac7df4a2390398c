"""What a program that computes next to nothing takes on real hosts: Ray actors of this machine, which
share its cores.

Core times are those that the kernel counts for the processes, over so many programs that its ticks do not
matter.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import jax
import jax.export
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.runtime_scale.fit import Measurement
from waystation import runtime
from waystation.runtime.client.backend import Backend
from waystation.runtime.cluster.island import Island
from waystation.runtime.ir import Arg, Compute, Program, Result, Sharding, SliceShape, Value, prepare
from waystation.runtime.resources import SliceRequest

IN_FLIGHT = 16
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_ELEMENTS_PER_DEVICE = 8
_HANDLES = count()  # no client uses one twice


def measure(sizes: Iterable[int], programs: int) -> Iterator[Measurement]:
    """Runs so many programs on one island after another, twice each, in a cluster of this process's own."""
    with runtime.connect(hosts=0) as cluster:
        for hosts in sizes:
            name = f"of-{hosts}"
            island = cluster.add_island(name, hosts=hosts)
            yield _measure(_Chain(cluster.backend(), name, hosts), island, programs)
            cluster.remove_island(name)


def _measure(chain: _Chain, island: Island, programs: int) -> Measurement:
    hosts = island.host_count
    chain.run(programs // 10, IN_FLIGHT)  # compiled, and connections are there
    alone_s = chain.run(programs // 5, 1)
    of_hosts = [host.process_id for host in island.status().hosts]
    of_controller = [os.getpid(), *(_descendants(os.getpid()) & _actors("Manager"))]
    before = [_core_s(of_controller), _core_s(of_hosts)]
    seconds = chain.run(programs, IN_FLIGHT)
    controller_s, hosts_s = (
        after - earlier
        for after, earlier in zip((_core_s(of_controller), _core_s(of_hosts)), before, strict=True)
    )
    return Measurement(
        hosts=hosts,
        cores=len(os.sched_getaffinity(0)),
        in_flight=IN_FLIGHT,
        seconds=seconds,
        alone_s=alone_s,
        controller_cpu_s=controller_s / programs,
        host_cpu_s=hosts_s / hosts / programs,
        enqueue_s=_enqueue_s(programs),
    )


class _Chain:
    """Programs of one small computation over all hosts, each of what the one before has made."""

    def __init__(self, backend: Backend, island: str, hosts: int) -> None:
        self._backend = backend
        sharding = Sharding((("hosts", hosts),), (("hosts",),))
        shape = (hosts * _ELEMENTS_PER_DEVICE,)
        self._slice = backend.grant(SliceRequest.of(hosts, island=island))
        given, made = (Value(number, shape, "float32", 0, sharding) for number in range(2))
        key = backend.register("step", _exported(hosts))
        nodes = Arg("x", given), Compute("step", key, 0, (0,), (sharding,), (made,)), Result((1,))
        self._fingerprint = backend.install(prepare(Program("scale", (SliceShape(0, (hosts,)),), nodes)))
        self._newest = next(_HANDLES)
        backend.put(self._newest, np.zeros(shape, np.float32), self._slice, sharding)

    def run(self, programs: int, in_flight: int) -> float:
        """Seconds for each program, of which so many are in flight."""
        pending: deque[int] = deque()
        began_s = time.perf_counter()
        for _ in range(programs):
            if len(pending) == in_flight:
                self._end(pending)
            before, self._newest = self._newest, next(_HANDLES)
            self._backend.run(self._fingerprint, [self._slice], [before], [self._newest])
            if before not in pending:  # it has been waited for
                self._backend.free([before])
            pending.append(self._newest)
        self._backend.wait([self._newest])
        self._backend.free([handle for handle in pending if handle != self._newest])
        return (time.perf_counter() - began_s) / programs

    def _end(self, pending: deque[int]) -> None:
        """Waits for the older half of what is in flight: to ask after each would be as much work again."""
        half = [pending.popleft() for _ in range(-(-len(pending) // 2))]
        self._backend.wait(half[-1:])
        self._backend.free([handle for handle in half if handle != self._newest])


def _exported(hosts: int) -> bytes:
    sharding = NamedSharding(AbstractMesh((hosts,), ("hosts",)), P("hosts"))
    step = jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)
    shape = jax.ShapeDtypeStruct((hosts * _ELEMENTS_PER_DEVICE,), "float32")
    return bytes(jax.export.export(step, platforms=["cpu"])(shape).serialize())


def _enqueue_s(programs: int) -> float:
    """Core time of a call that this process makes by itself."""
    step = jax.jit(lambda x: x + 1)
    x = jax.numpy.zeros(_ELEMENTS_PER_DEVICE, "float32")
    jax.block_until_ready(step(x))
    began_s = time.process_time()
    for _ in range(programs):
        x = step(x)
    jax.block_until_ready(x)
    return (time.process_time() - began_s) / programs


def _core_s(processes: Iterable[int]) -> float:
    """Core time of processes so far."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def _descendants(process: int) -> set[int]:
    children: set[int] = set()
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        children.update(map(int, path.read_text().split()))
    return children.union(*map(_descendants, children))


def _actors(kind: str) -> set[int]:
    """Processes of Ray's actors of a class, by the title that Ray gives them."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_text()
        except OSError:  # it has ended
            continue
        if title.startswith("ray::") and kind in title:
            found.add(int(path.parent.name))
    return found
