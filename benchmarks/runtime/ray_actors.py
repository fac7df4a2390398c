"""Ray by itself: an actor for each host, in one `jax.distributed` world, called by the driver.

What section 5.1 of the Pathways paper measures of Ray: a call for each computation (OpByOp), calls that are
chained by their futures, and a call that does a loop of computations (Fused). Actors do not wait for their
devices before they answer, except at the end.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from benchmarks.runtime import computations
from benchmarks.runtime.computations import CHAIN
from benchmarks.runtime.controller_process import Work, join
from benchmarks.runtime.shapes import Shape
from waystation._ports import free_port

NAME = "Ray"


class Actor:
    """One host.

    Args:
        shape: Of all hosts.
        index: Its place among them.
    """

    def __init__(self, shape: Shape, index: int) -> None:
        self._shape = shape
        self._index = index
        self._work: Any = None
        self._array: Any = None
        self._count = 0

    def join(self, coordinator: str) -> None:
        """Meets the others."""
        join(coordinator, self._index, self._shape)
        self._work = Work(self._shape)

    def begin(self) -> None:
        """Begins anew."""
        self._array, self._count = self._work.start(), 0

    def step(self, before: object = None) -> None:
        """One computation; `before` is what a call has answered that is to come first."""
        del before
        self._array = self._work.single_of(self._array)
        self._count += 1

    def loop(self, count: int) -> None:
        """So many."""
        for _ in range(count):
            self.step()

    def end(self) -> None:
        """Waits for all, and checks what they have made."""
        self._array.block_until_ready()

    def check(self) -> None:
        """Looks whether there were as many computations as were asked for."""
        first = self._index * self._shape.devices_per_host
        found = [float(shard.data[0]) for shard in self._array.addressable_shards]
        computations.check(found, self._count, self._shape.devices, first)


class RayActors:
    """Actors of the Ray that this process has joined. Use it in a `with`.

    Args:
        shape: How many, and with how many devices each.
    """

    def __init__(self, shape: Shape) -> None:
        kind = ray.remote(Actor).options(num_cpus=0)
        self._actors = [kind.remote(shape, index) for index in range(shape.hosts)]
        coordinator = f"127.0.0.1:{free_port()}"
        ray.get([actor.join.remote(coordinator) for actor in self._actors])

    def __enter__(self) -> RayActors:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def op_by_op_waiting(self, count: int) -> float:
        """A call for each computation and host, each waited for; returns how long that took, in seconds."""
        return self._timed(count, lambda: [ray.get(self._step()) for _ in range(count)])

    def op_by_op(self, count: int) -> float:
        """The same, without waiting for answers."""
        return self._timed(count, lambda: ray.get([each for _ in range(count) for each in self._step()]))

    def chained(self, count: int) -> float:
        """Chains of calls, each of which takes the future of the one before."""

        def chains() -> None:
            ends = []
            for _ in range(count // CHAIN):
                before: list[Any] = [None] * len(self._actors)
                for _ in range(CHAIN):
                    pairs = zip(self._actors, before, strict=True)
                    before = [actor.step.remote(future) for actor, future in pairs]
                ends += before
            ray.get(ends)

        return self._timed(count, chains)

    def fused(self, count: int) -> float:
        """Calls each of which does a loop of computations."""
        times = count // CHAIN
        loops = lambda: ray.get([actor.loop.remote(CHAIN) for _ in range(times) for actor in self._actors])  # noqa: E731
        return self._timed(count, loops)

    def _step(self) -> list[Any]:
        return [actor.step.remote() for actor in self._actors]

    def _timed(self, count: int, work: Any) -> float:
        del count
        ray.get([actor.begin.remote() for actor in self._actors])
        begin_s = time.monotonic()
        work()
        ray.get([actor.end.remote() for actor in self._actors])
        seconds = time.monotonic() - begin_s
        ray.get([actor.check.remote() for actor in self._actors])
        return seconds
