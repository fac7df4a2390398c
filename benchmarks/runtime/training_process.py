"""A process of plain JAX that trains, with the arguments of `controller_process`."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.processes import Outcome
from benchmarks.runtime import models
from benchmarks.runtime.computations import AXIS
from benchmarks.runtime.controller_process import serve
from benchmarks.runtime.models import Model
from benchmarks.runtime.shapes import Shape


def main() -> None:
    serve(lambda shape: Training(shape).run)


class Training:
    """Trains over all devices: each has all parameters, and its part of the examples.

    Args:
        shape: Of all processes.
    """

    def __init__(self, shape: Shape) -> None:
        del shape
        mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))
        self._whole, self._spread = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
        self._step = jax.jit(
            models.step,
            in_shardings=(self._whole, self._spread, self._spread),
            out_shardings=self._whole,
            donate_argnums=0,
        )

    def run(self, request: dict[str, Any]) -> Outcome:
        """Trains so many steps from the start; says how long that took, and the losses."""
        model = Model(int(request["width"]), int(request["batch"]))
        parameters: Any = [_placed(each, self._whole) for each in models.start(model)]
        given, wanted = (_placed(each, self._spread) for each in models.batch(model))
        losses = []
        begin_s = time.monotonic()
        for _ in range(int(request["count"])):
            parameters, loss = self._step(parameters, given, wanted)
            losses.append(loss)
        jax.block_until_ready(parameters)
        end_s = time.monotonic()
        # As text: two losses are the same if all of their bits are.
        found = [float(each).hex() for each in losses]
        return {"status": "ok", "begin_s": begin_s, "end_s": end_s, "losses": found}


def _placed(array: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])


if __name__ == "__main__":
    main()
