"""One process of multi-controller JAX: `python -m benchmarks.runtime.controller_process COORDINATOR INDEX
SHAPE`. It answers each line of standard input, a request, with a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.processes import Outcome, attempt
from benchmarks.runtime import computations
from benchmarks.runtime.computations import AXIS, CHAIN
from benchmarks.runtime.shapes import Shape
from waystation.runtime.hosts.world import die_with_parent

Run = Callable[[dict[str, Any]], Outcome]


def main() -> None:
    serve(lambda shape: Work(shape).run)


def serve(make: Callable[[Shape], Run]) -> None:
    """Joins the other processes, and answers until nobody asks any more.

    Args:
        make: Makes what answers, once all are there.
    """
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print what they like
    coordinator, index, shape = sys.argv[1], int(sys.argv[2]), Shape.parse(sys.argv[3])
    join(coordinator, index, shape)
    run = make(shape)
    for line in sys.stdin:
        answers.write(json.dumps(attempt(run, json.loads(line))) + "\n")


def join(coordinator: str, index: int, shape: Shape) -> None:
    """Gets the devices of one host, and meets the others.

    Raises:
        RuntimeError: There are not as many devices as there should be.
    """
    jax.config.update("jax_num_cpu_devices", shape.devices_per_host)
    if shape.hosts > 1:
        jax.distributed.initialize(coordinator, shape.hosts, index)
    if jax.device_count() != shape.devices:
        raise RuntimeError(f"{jax.device_count()} devices are there, not {shape.devices}")


class Work:
    """What a process does.

    Args:
        shape: Of all processes.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, P(AXIS))
        self._single = jax.jit(computations.single(mesh))
        self._fused = jax.jit(computations.fused(mesh))
        self._busy = jax.jit(computations.busy(mesh))

    def run(self, request: dict[str, Any]) -> Outcome:
        """Does so many computations; says when it began and ended."""
        count = int(request["count"])
        x = self.start()
        begin_s = time.monotonic()
        match request["operation"]:
            case "single":
                x = self._chain(self._single, x, count)
            case "fused":
                x = self._chain(self._fused, x, count // CHAIN)
            case "busy":
                x = self._chain(partial(_swapped, self._busy, self._turns(request["turns"])), x, count)
        x.block_until_ready()
        end_s = time.monotonic()
        first = jax.process_index() * self._shape.devices_per_host
        found = [float(shard.data[0]) for shard in x.addressable_shards]
        computations.check(found, count, self._shape.devices, first)
        return {"status": "ok", "begin_s": begin_s, "end_s": end_s}

    def single_of(self, x: jax.Array) -> jax.Array:
        """One computation."""
        made: jax.Array = self._single(x)
        return made

    def start(self) -> jax.Array:
        """What the first computation takes."""
        whole = computations.start(self._shape.devices)
        return jax.make_array_from_callback(whole.shape, self._sharding, lambda at: whole[at])

    def _turns(self, turns: int) -> jax.Array:
        whole = np.int32(turns)
        return jax.make_array_from_callback((), NamedSharding(self._mesh, P()), lambda at: whole)

    @staticmethod
    def _chain(step: Callable[[jax.Array], jax.Array], x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = step(x)
        return x


def _swapped(step: Callable[..., jax.Array], turns: jax.Array, x: jax.Array) -> jax.Array:
    return step(x, turns)


if __name__ == "__main__":
    main()
