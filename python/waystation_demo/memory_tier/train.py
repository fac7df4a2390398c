"""Trains a language model on several hosts: a complete program that keeps its state in their memory.

Three places matter to a program that wants to survive the loss of a host: `Checkpointer(…,
memory=MemoryTier())` keeps every step in memory and some on disk, `load` takes the newest that is whole,
wherever that is, and what the program needs to go on (the place in the text, the random state) is part of the
state. Besides, it ends as soon as another process has, so that `waystation launch` can start all of them
again at once.

Started by `waystation launch --torch`, on each host. What happens is written as one JSON object a line, for
the demo to follow: a file for each start of each process.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import distributed

from waystation.memory import MemoryTier
from waystation.training import Checkpointer, preservation_policies, save_decision_policies
from waystation_demo import data
from waystation_demo.memory_tier import model

ROWS = 4  # of each process, in each step
SEED = 0
State = dict[str, Any]


def initial_state(shape: model.Shape) -> State:
    """Everything that decides what the program does next; the same in all processes."""
    parameters = model.initialize(SEED, shape)
    torch.manual_seed(SEED)
    return {
        "parameters": parameters,
        "means": {name: torch.zeros_like(values) for name, values in parameters.items()},
        "squares": {name: torch.zeros_like(values) for name, values in parameters.items()},
        "step": 0,
        "position": 0,  # in the text
        "random": torch.get_rng_state(),
    }


def train_step(state: State, windows: data.Windows, shape: model.Shape) -> float:
    """One step over all processes, in place; returns the mean loss."""
    index, count = distributed.get_rank(), distributed.get_world_size()
    torch.set_rng_state(state["random"])
    parameters = {name: values.detach().requires_grad_() for name, values in state["parameters"].items()}
    tokens = torch.from_numpy(windows.batch(state["position"] + index * ROWS, ROWS)).long()
    loss = model.loss(parameters, tokens, shape)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    mean = mean_of_all(torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach()[None]]))
    parts = torch.split_with_sizes(mean[:-1], [gradient.numel() for gradient in gradients])
    shaped = (part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))
    model.advance(state, dict(zip(parameters, shaped, strict=True)))
    state["position"] += count * ROWS
    state["random"] = torch.get_rng_state()
    return float(mean[-1])


def mean_of_all(values: torch.Tensor) -> torch.Tensor:
    """The mean over all processes, added in their order, so that it is the same to the last bit every
    time."""
    parts = [torch.empty_like(values) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, values)
    return functools.reduce(torch.add, parts) / len(parts)


def tensors_of(state: State) -> Iterator[torch.Tensor]:
    """All tensors of the state, in order."""
    for part in state.values():
        yield from part.values() if isinstance(part, dict) else [torch.as_tensor(part)]


def digest(state: State) -> str:
    """SHA-256 of every byte of the state."""
    total = hashlib.sha256()
    for tensor in tensors_of(state):
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()


class Neighbours:
    """Notices at once that another process has died: each waits for a word of the next one, which that only
    says when all is done. The connection of one that dies closes, and whoever waits for its word ends,
    too."""

    def __init__(self) -> None:
        group = distributed.new_group(timeout=timedelta(days=30))
        assert isinstance(group, distributed.ProcessGroup), "this process has part in it"
        self._group = group
        self._is_over = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            distributed.recv(torch.zeros(1), src=self._other(1), group=self._group)
        except RuntimeError:
            os._exit(1)
        self._is_over.set()

    def part(self) -> None:
        """All is done, here and in the other processes."""
        distributed.send(torch.zeros(1), dst=self._other(-1), group=self._group)
        self._is_over.wait()
        distributed.barrier()

    def _other(self, places: int) -> int:
        return (distributed.get_rank() + places) % distributed.get_world_size()


class Report:
    """Tells the demo what happens, and when."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def tell(self, event: str, **details: Any) -> None:
        """Writes a line."""
        print(json.dumps({"event": event, "at_s": time.time()} | details), file=self._file, flush=True)


def checkpointer_of(arguments: argparse.Namespace) -> Checkpointer:
    """Saves every step to memory, if there is a memory tier, and some of them to disk."""
    every, never = save_decision_policies.FixedIntervalPolicy, save_decision_policies.SpecificStepsPolicy
    return Checkpointer(
        arguments.checkpoints,
        save_decision_policy=every(arguments.save_every) if arguments.save_every else never(()),
        preservation_policy=preservation_policies.LatestN(2),
        memory=MemoryTier() if arguments.memory else None,
    )


def train(arguments: argparse.Namespace, report: Report) -> None:
    """Starts, or goes on, and trains up to the last step."""
    shape = model.Shape(width=arguments.width, layers=arguments.layers)
    windows = data.Windows(data.standard_library_text(), shape.context + 1, SEED)
    state = initial_state(shape)
    report.tell("opening")
    with checkpointer_of(arguments) as checkpointer:
        try:
            newest = checkpointer.latest
            if newest is not None:
                state = checkpointer.load(None, state)
                report.tell("restored", step=state["step"], tiers=newest.tiers)
            while state["step"] < arguments.steps:
                loss = train_step(state, windows, shape)
                # It waits until the step before has its copies, so that memory has every step, as the demo
                # says. `save_async` never waits for that, and leaves out steps that come too fast.
                checkpointer.save(state["step"], state)
                kept = checkpointer.tier_statistics
                kept_step = None if kept is None else kept.last_saved_step
                report.tell("step", step=state["step"], loss=loss.hex(), kept_step=kept_step)
        except Exception:
            # To wait for saves that others have part in would take until these are known to be dead.
            traceback.print_exc()
            os._exit(1)
    report.tell("done", step=state["step"], digest=digest(state))


def parse_arguments() -> argparse.Namespace:
    """The command line of this program."""
    parser = argparse.ArgumentParser(prog="python -m waystation_demo.memory_tier.train", description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory of the steps on disk")
    parser.add_argument("--events", type=Path, required=True, help="directory to write to what happens")
    parser.add_argument("--memory", action="store_true", help="keep every step in memory, too")
    parser.add_argument("--steps", type=int, default=60, help="last step (default 60)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves to disk (0: never)")
    parser.add_argument("--width", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    return parser.parse_args()


def main() -> None:
    """Runs the program."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    # What a process that was killed has written is not gone on with.
    with (arguments.events / f"{distributed.get_rank()}-{time.time_ns()}.jsonl").open("x") as file:
        neighbours = Neighbours()
        train(arguments, Report(file))
        neighbours.part()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
