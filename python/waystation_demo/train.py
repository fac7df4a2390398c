"""Trains a language model: a complete program that uses Waystation, and the one to copy from.

Four places matter to a program that wants to survive: `state_layout` describes the state without
allocating it, `waystation.load` fills such a description on whatever devices there are now,
`waystation.save_async` returns once the state may change again, and `result()` of what it returned
raises if that save failed. The rest is training as usual. `python -m waystation_demo.train --help`
runs it by hand.

What happens is printed as one JSON object a line, for the demo to follow. Digests are part of the
demo's proof, not of saving: they tell the exact bytes of the live state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import waystation
from waystation_demo import data, model

SHAPE = model.Shape(vocabulary=data.VOCABULARY)
BATCH = 32
State = dict[str, Any]

_one_line_at_a_time = threading.Lock()
optimizer = optax.adamw(optax.warmup_constant_schedule(0.0, 5e-3, warmup_steps=20), weight_decay=0.01)


def initial_state(seed: int) -> State:
    """Everything that decides what the program does next."""
    first_key, key = jax.random.split(jax.random.key(seed))
    parameters = model.initialize(first_key, SHAPE)
    return {
        "parameters": parameters,
        "optimizer": optimizer.init(parameters),
        "step": jnp.int32(0),
        "key": key,
        "data": {"position": jnp.int32(0)},
    }


def state_layout(mesh: Mesh, seed: int) -> State:
    """The abstract state: shapes, dtypes and where each array lives on `mesh`; no memory is used."""

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # The optimizer's moments have the names of their parameters and are split like them.
        partition = model.PARTITIONS.get(getattr(path[-1], "key", ""), PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, partition))

    layout: State = jax.tree.map_with_path(place, jax.eval_shape(partial(initial_state, seed)))
    return layout


def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """One step of the optimizer."""
    key, dropout_key = jax.random.split(state["key"])
    loss, gradients = jax.value_and_grad(model.loss)(state["parameters"], tokens, dropout_key, SHAPE)
    updates, moments = optimizer.update(gradients, state["optimizer"], state["parameters"])
    following = {
        "parameters": optax.apply_updates(state["parameters"], updates),
        "optimizer": moments,
        "step": state["step"] + 1,
        "key": key,
        "data": {"position": state["data"]["position"] + tokens.shape[0]},
    }
    return following, loss


def digests(state: State) -> dict[str, str]:
    """SHA-256 of the bytes of every array, by its dotted name."""
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in _leaves(state)}
    return {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for name, leaf in named.items()}


def _leaves(state: State) -> list[tuple[Any, jax.Array]]:
    plain = state | {"key": jax.random.key_data(state["key"])}
    return jax.tree_util.tree_leaves_with_path(plain)


def report(event: str, **details: Any) -> None:
    """Tells the demo what happened; called from the thread that trains and the one that saves."""
    with _one_line_at_a_time:
        print(json.dumps({"event": event} | details), flush=True)


class Saver:
    """Saves in the background, one checkpoint at a time, and measures what that costs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._threads = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def save(self, step: int, state: State) -> None:
        """Returns when `state` may be donated; the previous save is finished by then."""
        self.wait()
        report("save_started", step=step, digests=digests(state))
        started = time.perf_counter()
        response = waystation.save_async(self._root / f"step_{step:06}", state)
        blocking_s = time.perf_counter() - started
        self._last = self._threads.submit(self._finish, response, step, started, blocking_s)

    def wait(self) -> None:
        """Waits for the save in flight and raises its error, if it had one."""
        if self._last is not None:
            self._last.result()

    def _finish(self, response: Any, step: int, started: float, blocking_s: float) -> None:
        response.result()
        report("saved", step=step, blocking_s=blocking_s, total_s=time.perf_counter() - started)


def train(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Starts, or resumes, and trains up to the last step."""
    layout = state_layout(mesh, arguments.seed)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, layout)
    # The old state is donated: its memory holds the new one. Both have one sharding, or it is compiled twice.
    make_step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    if arguments.resume is None:
        state = jax.jit(partial(initial_state, arguments.seed), out_shardings=shardings)()
        report("initialized")
    else:
        started = time.perf_counter()
        state = jax.block_until_ready(waystation.load(arguments.resume, layout))
        load_s = time.perf_counter() - started
        report("resumed", step=int(state["step"]), load_s=load_s, digests=digests(state))

    windows = data.Windows(data.standard_library_text(), SHAPE.context + 1, arguments.seed)
    batch_sharding = NamedSharding(mesh, PartitionSpec("data"))
    saver = Saver(arguments.checkpoints)
    for step in range(int(state["step"]) + 1, arguments.steps + 1):
        tokens = windows.batch(int(state["data"]["position"]), BATCH)
        state, loss = make_step(state, jax.device_put(tokens, batch_sharding))
        report("step", step=step, loss=float(loss))
        if arguments.save_every and step % arguments.save_every == 0:
            saver.save(step, state)
    saver.wait()


def parse_arguments() -> argparse.Namespace:
    """The command line of this program."""
    parser = argparse.ArgumentParser(prog="python -m waystation_demo.train", description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory to save checkpoints in")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--mesh", default="2x4", help="devices along the data and model axes (default 2x4)")
    parser.add_argument("--steps", type=int, default=100, help="last step (default 100)")
    parser.add_argument("--save-every", type=int, default=5, help="steps between saves (default 5; 0: never)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Runs the program."""
    arguments = parse_arguments()
    along_data, along_model = (int(size) for size in arguments.mesh.split("x"))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", along_data * along_model)
    devices = np.array(jax.devices()).reshape(along_data, along_model)
    train(arguments, Mesh(devices, ("data", "model")))


if __name__ == "__main__":
    main()
