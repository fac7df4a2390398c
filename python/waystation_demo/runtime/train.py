"""Trains a language model on an island of a cluster, and goes on when a host of it is lost.

This process has no device of its own: what it places on slices runs on the hosts. Three places matter to a
program that wants to survive the loss of hosts: `save` has the hosts save the state, `HostLost` is raised
where something is read that was on them, and `load` brings the state back once the island is there again.
`python -m waystation_demo.runtime.train --help` runs it by hand. What happens is printed as one JSON object a
line, for the demo to follow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from waystation import runtime
from waystation.runtime.errors import HostLost
from waystation_demo import data, model

BATCH = 16
AHEAD = 6  # steps that are under way while the loss of the first of them is waited for
RATE, DECAY = 0.1, 0.9
State = dict[str, Any]


def report(event: str, **details: Any) -> None:
    """Tells the demo what happened."""
    print(json.dumps({"event": event} | details), flush=True)


class Training:
    """The model on a slice, and what is known of it here.

    Args:
        client: Where it runs.
        island: The island that trains.
        checkpoints: Where hosts save the state.
        shape: The model.
    """

    def __init__(self, client: runtime.Client, island: str, checkpoints: Path, shape: model.Shape) -> None:
        on = client.make_virtual_device_set().add_slice(devices=2, island=island, shared=True)
        everywhere = PartitionSpec()
        self._client = client
        self._checkpoints = checkpoints
        self._windows = data.Windows(data.standard_library_text(), shape.context + 1, seed=0)

        def start(seed: jax.Array) -> State:
            parameters = model.initialize(jax.random.key(seed), shape)
            return {"parameters": parameters, "momentum": jax.tree.map(jnp.zeros_like, parameters)}

        def step(state: State, tokens: jax.Array, number: jax.Array) -> tuple[State, jax.Array]:
            key = jax.random.fold_in(jax.random.key(1), number)
            loss, gradients = jax.value_and_grad(model.loss)(state["parameters"], tokens, key, shape)
            norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients)))
            clipped = jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1.0), gradients)
            momentum = jax.tree.map(lambda old, new: DECAY * old + new, state["momentum"], clipped)
            parameters = jax.tree.map(lambda old, change: old - RATE * change, state["parameters"], momentum)
            return {"parameters": parameters, "momentum": momentum}, loss

        self._start = client.jit(start, on, out_shardings=everywhere, name="start")
        # The batch is split over the devices of the slice, and each has all parameters.
        self._step = client.jit(
            step,
            on,
            in_shardings=(everywhere, PartitionSpec("x"), everywhere),
            out_shardings=everywhere,
            donate_argnums=0,
            name="train step",
        )
        self._state: State = {}

    def begin(self) -> None:
        """Makes the state at the start of training, on the hosts."""
        self._state = self._start(jnp.int32(0))
        self._client.flush()

    def step(self, number: int) -> Any:
        """Has one step done; returns its loss, which need not be there yet."""
        tokens = self._windows.batch((number - 1) * BATCH, BATCH)
        self._state, loss = self._step(self._state, tokens, jnp.int32(number))
        self._client.flush()
        return loss

    def save(self, number: int) -> None:
        """Has the state after a step saved; returns when the checkpoint is whole."""
        path = str(self._checkpoints / f"step_{number:06}")
        # A save that was committed when its host was lost is made again.
        self._client.save(path, self._state, overwrite=True)
        report("saved", step=number)

    def load(self, number: int) -> None:
        """Has a saved state loaded, as soon as its island is there."""
        self._state = self._client.load(str(self._checkpoints / f"step_{number:06}"), self._state)


def train(training: Training, steps: int, save_every: int, hold_at: int = 0) -> None:
    """Trains up to the last step, from the last save on when a host is lost; at `hold_at` it waits until
    stdin ends, so that what is done to its hosts meanwhile never comes too late."""

    def tell(number: int, loss: Any) -> None:
        report("step", step=number, loss=float(loss))
        if number == hold_at:
            sys.stdin.read()

    training.begin()
    begin, saved = 0, 0
    while True:
        under_way: deque[tuple[int, Any]] = deque()
        try:
            for number in range(begin + 1, steps + 1):
                under_way.append((number, training.step(number)))
                if len(under_way) > AHEAD:
                    tell(*under_way.popleft())
                if save_every and number % save_every == 0:
                    while under_way:  # what is on the hosts alone is lost with them
                        tell(*under_way.popleft())
                    training.save(number)
                    saved = number
            while under_way:
                tell(*under_way.popleft())
            return
        except HostLost as error:
            if not saved:
                raise
            report("lost", message=error.message, host=error.context["host"])
            training.load(saved)
            begin = saved
            report("resumed", step=saved)


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(prog="python -m waystation_demo.runtime.train", description=__doc__)
    parser.add_argument("address", help="of the cluster")
    parser.add_argument("--name", default="training", help="what the cluster calls this program")
    parser.add_argument("--island", default="east", help="which has two devices or more")
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory to save checkpoints in")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves (0: never)")
    parser.add_argument("--hold-at", type=int, default=0, help="step after which to wait until stdin ends")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # of this process, which only traces
    shape = model.Shape(vocabulary=data.VOCABULARY, width=arguments.width, layers=arguments.layers)
    with runtime.connect(arguments.address, name=arguments.name) as cluster, cluster.start_client() as client:
        training = Training(client, arguments.island, arguments.checkpoints, shape)
        train(training, arguments.steps, arguments.save_every, arguments.hold_at)


if __name__ == "__main__":
    main()
