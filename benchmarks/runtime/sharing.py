"""Clients of one cluster that keep programs of one computation in flight on the same devices."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.runtime import computations
from benchmarks.runtime.computations import AXIS
from benchmarks.runtime.shapes import Shape
from waystation import runtime
from waystation.runtime.timeline.competition import competing_shares

ISLAND = "shared"
IN_FLIGHT = 16


class Tenant:
    """One client.

    Args:
        cluster: Its own connection.
        shape: Of the island.
    """

    def __init__(self, cluster: runtime.Cluster, shape: Shape) -> None:
        self.name = cluster.client
        self._shape = shape
        self._client = client = cluster.start_client()
        self._slice = on = client.make_virtual_device_set().add_slice(
            shape.devices, island=ISLAND, shared=True
        )
        self._busy = client.jit(
            computations.busy(on.mesh), on, name="busy", in_shardings=(P(AXIS), P()), out_shardings=P(AXIS)
        )
        self._given: Any = None
        self._newest: Any = None
        self._count = 0

    def prepare(self, turns: int) -> None:
        """Has what its programs take, before the clock runs."""
        self._given = self._client.put(np.int32(turns), self._slice)
        self._newest = self._client.put(computations.start(self._shape.devices), self._slice, P(AXIS))
        self._newest.block_until_ready()
        self._count = 0

    def run(self, goes_on: Callable[[int], bool]) -> int:
        """Runs programs while that goes on, given how many there were; returns how many there were."""
        pending: deque[Any] = deque()
        while goes_on(self._count):
            if len(pending) == IN_FLIGHT:
                for _ in range(IN_FLIGHT // 2 - 1):
                    pending.popleft()
                pending.popleft().block_until_ready()
            self._newest = self._busy(self._newest, self._given)
            self._client.flush()
            pending.append(self._newest)
            self._count += 1
        self._newest.block_until_ready()
        return self._count

    def check(self) -> None:
        """Looks whether it was so many computations.

        Raises:
            ValueError: It was not.
        """
        if self._count:
            computations.check(self._newest.numpy(), self._count, self._shape.devices)


class Tenants:
    """Clients, each with a connection, on an island of their own. Use it in a `with`.

    Args:
        cluster: The cluster.
        shape: Of the island.
        clients: How many there can be.
    """

    def __init__(self, cluster: runtime.Cluster, shape: Shape, clients: int) -> None:
        self._cluster = cluster
        self._ends = ExitStack()
        cluster.add_island(ISLAND, hosts=shape.hosts, devices_per_host=shape.devices_per_host)
        numbers = count()
        connections = [
            self._ends.enter_context(runtime.connect(cluster.address, name=f"client-{next(numbers)}"))
            for _ in range(clients)
        ]
        self._tenants = [Tenant(each, shape) for each in connections]

    def __enter__(self) -> Tenants:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def run(self, clients: int, computations: int, turns: int) -> float:
        """So many computations by the first clients together; returns how long that took, in seconds."""
        each = computations // clients
        return self._together(self._tenants[:clients], turns, lambda done: done < each)[1]

    def share(self, weights: Sequence[int], seconds: float, turns: int) -> tuple[int, list[float]]:
        """Gives clients weights, and has them compete for so long.

        Returns:
            How many computations there were, and each client's part of the device time.
        """
        tenants = self._tenants[: len(weights)]
        names = [tenant.name for tenant in tenants]
        self._cluster.share(dict(zip(names, weights, strict=True)))
        self._together(tenants, turns, lambda done: done < 1)  # now all is compiled
        self._cluster.record_timeline()
        end_s = time.monotonic() + seconds
        counts, _ = self._together(tenants, turns, lambda done: time.monotonic() < end_s)
        shares = competing_shares(self._cluster.timeline(forget=True), ISLAND, names)
        self._cluster.record_timeline(False)
        return sum(counts), [shares[name] for name in names]

    @staticmethod
    def _together(
        tenants: Sequence[Tenant], turns: int, goes_on: Callable[[int], bool]
    ) -> tuple[list[int], float]:
        ready = threading.Barrier(len(tenants) + 1)
        ended: dict[str, tuple[int, float]] = {}
        failed: list[BaseException] = []

        def work(tenant: Tenant) -> None:
            ready.wait()
            try:
                ended[tenant.name] = tenant.run(goes_on), time.monotonic()
            except BaseException as error:
                failed.append(error)

        for tenant in tenants:
            tenant.prepare(turns)
        threads = [threading.Thread(target=work, args=(tenant,)) for tenant in tenants]
        for thread in threads:
            thread.start()
        ready.wait()
        begin_s = time.monotonic()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        for tenant in tenants:
            tenant.check()
        counts = [ended[tenant.name][0] for tenant in tenants]
        return counts, max(end_s for _, end_s in ended.values()) - begin_s
