"""Pipelines on hosts of a cluster: programs with a stage on each host, one after the other."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import numpy as np

from waystation import runtime
from waystation.runtime.client.backend import Backend
from waystation.runtime.controller import Dispatch

ISLAND = "stages"
TRAVERSALS = 32
"""Of a pipeline, in a program of many."""
_VALUES = 16
# The client gives its own arrays numbers from 0 on.
_HANDLES = count(1 << 40)


class Pipelines:
    """Stages that add one to a few numbers, on the first hosts of an island of one-device hosts.

    Args:
        cluster: The cluster.
        hosts: How many hosts the island has.
    """

    def __init__(self, cluster: runtime.Cluster, hosts: int) -> None:
        cluster.add_island(ISLAND, hosts=hosts)
        self._client = cluster.start_client()
        self._backend: Any = self._client.backend
        devices = self._client.make_virtual_device_set()
        slices = [devices.add_slice(1, island=ISLAND) for _ in range(hosts)]
        self._stages = [
            self._client.jit(_stage, on, name=f"stage-{place}") for place, on in enumerate(slices)
        ]
        self._slices = [on.number for on in slices]
        self._x = self._client.put(np.zeros(_VALUES, np.float32), slices[0])

    def program(self, stages: int, traversals: int, dispatch: Dispatch) -> Traversals:
        """A program that goes so many times through the first stages, each time with what went in."""

        @runtime.program
        def traverse(x: Any) -> Any:
            found = []
            for _ in range(traversals):
                y = x
                for stage in self._stages[:stages]:
                    y = stage(y)
                found.append(y)
            return found

        program = traverse.trace(self._x)
        fingerprint = self._backend.install(program, dispatch)
        return Traversals(
            self._backend,
            fingerprint,
            self._slices[:stages],
            self._x.usable("used").handle,
            stages,
            traversals,
        )


class Traversals:
    """A program that goes through stages.

    Args:
        backend: Runs it.
        fingerprint: What it is known by.
        slices: The slices of its stages.
        given: The handle of what goes in.
        stages: How many there are.
        traversals: How often one run goes through them.
    """

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        slices: list[int],
        given: int,
        stages: int,
        traversals: int,
    ) -> None:
        self._backend = backend
        self._fingerprint = fingerprint
        self._slices = slices
        self._given = given
        self._stages = stages
        self._traversals = traversals

    @property
    def computations(self) -> int:
        """How many a run has."""
        return self._stages * self._traversals

    def one_by_one(self, computations: int) -> float:
        """Runs it so often that there are so many computations, and waits for each run; returns how long that
        took, in seconds."""
        begin_s = time.monotonic()
        for _ in range(computations // self.computations):
            made = self._run()
            self._backend.wait(made[-1:])
            self._backend.free(made)
        return self._checked(time.monotonic() - begin_s)

    def ahead(self, computations: int) -> float:
        """The same, without waiting before the end."""
        begin_s = time.monotonic()
        made: list[int] = []
        for _ in range(computations // self.computations):
            self._backend.free(made)  # it is freed once it has been made
            made = self._run()
        self._backend.wait(made[-1:])
        self._backend.free(made)
        return self._checked(time.monotonic() - begin_s)

    def _run(self) -> list[int]:
        made = [next(_HANDLES) for _ in range(self._traversals)]
        self._backend.run(self._fingerprint, self._slices, [self._given], made)
        return made

    def _checked(self, seconds: float) -> float:
        made = self._run()
        found = self._backend.get(made[-1])
        self._backend.free(made)
        if not np.array_equal(found, np.full(_VALUES, self._stages, np.float32)):
            raise ValueError(f"{self._stages} stages should have added as much, not made {found}")
        return seconds


def _stage(x: Any) -> Any:
    return x + 1
