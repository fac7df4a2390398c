"""Programs of one computation, as a client gives them to a cluster; and waiting for what follows."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from waystation.runtime.cluster import Cluster, ClusterBackend, connect
from waystation.runtime.ir import Arg, Compute, Program, Result, Sharding, SliceShape, Value, prepare
from waystation.runtime.resources import SliceRequest

HANDLES = itertools.count(1)
WAIT_S = 120.0
PROGRAM = [sys.executable, "-m", "tests.runtime.cluster.programs"]


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A program in a process of its own, and what it says. It goes on for as long as the block does."""
    command = [*PROGRAM, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def manager_of(cluster: Cluster) -> int:
    """The process of the manager, which says itself where it is."""
    return int(re.match(r"process (\d+) on", cluster._connection._where)[1])


@contextlib.contextmanager
def visiting(address: str, name: str = "first", **options: Any) -> Iterator[Cluster]:
    """Connects to a cluster, and removes all islands in the end."""
    with connect(address, name=name, **options) as cluster:
        try:
            yield cluster
        finally:
            for name in cluster.islands:
                cluster.remove_island(name)


def run_client(module: str, *arguments: str) -> None:
    """Runs a module of `tests.runtime.client` in a process of its own, to its end."""
    command = [sys.executable, "-m", f"tests.runtime.client.{module}", *arguments]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def wait_until(condition: Callable[[], bool], seen: object = None) -> None:
    """Waits for a condition; says what was `seen` last if it never comes."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"in vain; seen last: {seen}"
        time.sleep(0.05)


def rows(devices: int) -> Sharding:
    return Sharding((("d", devices),), (("d",),))


def exported(function: Callable[..., Any], devices: int, shape: tuple[int, ...] = (8,)) -> bytes:
    """A function of one array in rows, exported by this process alone."""
    mesh = jax.sharding.AbstractMesh((devices,), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
    traced = jax.export.export(jitted, platforms=["cpu"])(jax.ShapeDtypeStruct(shape, np.float32))
    return bytes(traced.serialize())


def add_sum(x: Any) -> Any:
    """`x + sum(x)`, where the sum is a collective over all devices."""
    return x + jax.numpy.sum(x)


class Slice:
    """Some devices of an island, and one function on them."""

    def __init__(
        self,
        backend: ClusterBackend,
        island: str,
        devices: int,
        function: Callable[..., Any] = add_sum,
        *,
        shape: tuple[int, ...] = (8,),
        name: str = "train",
        key: str | None = None,
    ) -> None:
        self.backend = backend
        self.shape = shape
        self.sharding = rows(devices)
        self.number = backend.grant(SliceRequest.of(devices, island=island, shared=True))
        if key is None:
            key = backend.register(function.__name__, exported(function, devices, shape))
        nodes = (
            Arg("x", self.value(0)),
            Compute("step", key, 0, (0,), (self.sharding,), (self.value(1),)),
            Result((1,)),
        )
        program = prepare(Program(name, (SliceShape(0, (devices,)),), nodes))
        self.fingerprint = backend.install(program)

    def value(self, number: int) -> Value:
        return Value(number, self.shape, "float32", 0, self.sharding)

    def put(self, array: np.ndarray) -> int:
        handle = next(HANDLES)
        self.backend.put(handle, array.astype(np.float32), self.number, self.sharding)
        return handle

    def step(self, handle: int) -> int:
        """Calls the function once."""
        made = next(HANDLES)
        self.backend.run(self.fingerprint, [self.number], [handle], [made])
        return made

    def steps(self, handle: int, count: int) -> int:
        """Calls it on what it gives, without waiting in between; only the last result stays."""
        for _ in range(count):
            before, handle = handle, self.step(handle)
            self.backend.free([before])
        return handle


def call(backend: ClusterBackend, fingerprint: str, slices: Sequence[int], *arguments: int) -> int:
    """Runs a program that returns one array."""
    made = next(HANDLES)
    backend.run(fingerprint, slices, arguments, [made])
    return made
