"""The runtime, as a program uses it: functions on a slice of all devices of an island."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.runtime import computations
from benchmarks.runtime.computations import AXIS, CHAIN
from benchmarks.runtime.shapes import Shape
from waystation import runtime

NAME = "Waystation"


class OwnIsland:
    """An island of a cluster, and functions on all of its devices. Use it in a `with`.

    Args:
        cluster: The cluster.
        shape: Of the island.
    """

    def __init__(self, cluster: runtime.Cluster, shape: Shape) -> None:
        self._cluster = cluster
        self._shape = shape
        self._name = f"island-{shape}"
        cluster.add_island(self._name, hosts=shape.hosts, devices_per_host=shape.devices_per_host)
        self._client = client = cluster.start_client()
        self._slice = on = client.make_virtual_device_set().add_slice(shape.devices, island=self._name)
        spread = {"in_shardings": P(AXIS), "out_shardings": P(AXIS)}
        self._single = client.jit(computations.single(on.mesh), on, name="step", **spread)
        self._fused = client.jit(computations.fused(on.mesh), on, name="chain", **spread)
        self._busy = client.jit(
            computations.busy(on.mesh), on, name="busy", in_shardings=(P(AXIS), P()), out_shardings=P(AXIS)
        )

        def chain(x: runtime.Array) -> runtime.Array:
            for _ in range(CHAIN):
                x = self._single(x)
            return x

        self._chain = runtime.program(chain)
        self._chain_of_calls = runtime.program(chain, name="chain of calls", join_chains=False)

    def __enter__(self) -> OwnIsland:
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.remove_island(self._name)

    def op_by_op(self, count: int) -> float:
        """A call for each computation, as they come; returns how long that took, in seconds."""
        return self._timed(self._single, count, count)

    def op_by_op_alone(self, count: int) -> float:
        """The same, each sent by itself: nothing is put together."""

        def step(x: runtime.Array) -> runtime.Array:
            made: runtime.Array = self._single(x)
            self._client.flush()
            return made

        return self._timed(step, count, count)

    def chained(self, count: int) -> float:
        """Programs that are traced, of many computations each."""
        return self._timed(self._chain, count // CHAIN, count)

    def chained_unjoined(self, count: int) -> float:
        """The same programs; each of their computations is dispatched by itself, however often they run."""
        return self._timed(self._chain_of_calls, count // CHAIN, count)

    def fused(self, count: int) -> float:
        """Calls of one computation that is a chain of them."""
        return self._timed(self._fused, count // CHAIN, count)

    def busy(self, count: int, turns: int) -> float:
        """As `op_by_op_alone`, of computations that take a while."""
        given = self._client.put(np.int32(turns), self._slice)
        given.block_until_ready()

        def step(x: runtime.Array) -> runtime.Array:
            made: runtime.Array = self._busy(x, given)
            self._client.flush()
            return made

        return self._timed(step, count, count)

    def _timed(self, step: Callable[[Any], Any], times: int, count: int) -> float:
        x = self._client.put(computations.start(self._shape.devices), self._slice, P(AXIS))
        x.block_until_ready()
        begin_s = time.monotonic()
        for _ in range(times):
            x = step(x)
        x.block_until_ready()
        seconds = time.monotonic() - begin_s
        computations.check(x.numpy(), count, self._shape.devices)
        return seconds
