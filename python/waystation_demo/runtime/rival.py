"""The other program of the demo: it has matrices multiplied on all islands, as fast as these let it.

It ends when its stdin does. Where a host is lost it begins anew, on the island that takes its place.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from waystation import runtime
from waystation.runtime.errors import HostLost
from waystation_demo.runtime.train import report

AHEAD = 6
REPEATS = 8  # products in one call


class Products:
    """Products on one island, each of what the one before has given.

    Args:
        client: Whose they are.
        island: Where.
        size: Rows and columns of the matrices.
    """

    def __init__(self, client: runtime.Client, island: str, size: int) -> None:
        on = client.make_virtual_device_set().add_slice(devices=2, island=island, shared=True)
        rows = PartitionSpec("x")
        self._client = client

        def start(value: jax.Array) -> jax.Array:
            return jnp.full((size, size), value)

        def multiply(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
            for _ in range(REPEATS):
                matrix = jnp.tanh(matrix @ jnp.eye(size, dtype=jnp.float32) + matrix)
            return matrix, jnp.sum(matrix)

        self._start = client.jit(start, on, out_shardings=rows, name="start")
        self._multiply = client.jit(
            multiply, on, in_shardings=rows, out_shardings=(rows, PartitionSpec()), name="multiply"
        )
        self._under_way: deque[Any] = deque()
        self._matrix: Any = None

    def go_on(self) -> None:
        """Has one more call done, and waits for an earlier one where there are many."""
        try:
            if self._matrix is None:
                self._matrix = self._start(jnp.float32(0.001))
            self._matrix, total = self._multiply(self._matrix)
            self._client.flush()
            self._under_way.append(total)
            if len(self._under_way) > AHEAD:
                self._under_way.popleft().block_until_ready()
        except HostLost as error:
            report("lost", message=error.message, host=error.context["host"])
            self._matrix = None
            self._under_way.clear()


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(prog="python -m waystation_demo.runtime.rival", description=__doc__)
    parser.add_argument("address", help="of the cluster")
    parser.add_argument("--name", default="rival", help="what the cluster calls this program")
    parser.add_argument("--islands", nargs="+", default=["east", "west"], help="each of two devices or more")
    parser.add_argument("--size", type=int, default=512, help="of the matrices")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # of this process, which only traces
    is_over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with runtime.connect(arguments.address, name=arguments.name) as cluster, cluster.start_client() as client:
        products = [Products(client, island, arguments.size) for island in arguments.islands]
        calls = 0
        while not is_over.is_set():
            for each in products:
                each.go_on()
            calls += 1
            if calls == AHEAD:
                report("busy")


if __name__ == "__main__":
    main()
