"""One run of a program that trains and saves: `python -m benchmarks.memory.training_process REQUEST`.

Before the clock starts two steps are taken, so that everything is compiled, and one save of the whole state
is made. The clock ends when the last save is whole.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import processes
from benchmarks.measure import Meter
from benchmarks.memory.agents import Agent, checkpointer_of
from benchmarks.memory.trainers import SIZES, trainer_of
from benchmarks.processes import Outcome
from benchmarks.systems import SYSTEMS

NOWHERE, MEMORY = "no saves", "memory"


@dataclass(frozen=True, slots=True)
class Request(processes.Request):
    """What a run is.

    Attributes:
        framework: `jax` or `torch`.
        size: Of `SIZES`.
        place: Where saves go: nowhere, to memory, or to the disk, by the name of a system that does it.
        every: Iterations from one save to the next.
        iterations: How many are timed.
        path: The directory of the checkpoints.
        agent: Directory and process of the agent, where memory is used.
    """

    framework: str
    size: str
    place: str
    every: int
    iterations: int
    path: str
    agent: tuple[str, int] | None = None


Save = Callable[[int, Any], None]
Wait = Callable[[], None]


def run(request: Request) -> Outcome:
    """Trains; returns how long that took, and for how long saves held it up."""
    trainer = trainer_of(request.framework, SIZES[request.size])
    agent = None if request.agent is None else Agent(Path(request.agent[0]), request.agent[1])
    trainer.step()
    trainer.step()
    blocked_s: list[float] = []
    with saving(request) as (save, wait):
        save(0, trainer.state())
        wait()
        agent_cpu_s = agent.cpu_seconds() if agent else 0.0
        meter = Meter()
        with meter.running():
            for iteration in range(1, request.iterations + 1):
                trainer.step()
                if request.every and iteration % request.every == 0:
                    begun = time.perf_counter()
                    save(iteration, trainer.state())
                    blocked_s.append(time.perf_counter() - begun)
            wait()
            meter.mark("trained")
        agent_cpu_s = agent.cpu_seconds() - agent_cpu_s if agent else 0.0
    trained_s = meter.seconds["trained"]
    return {
        "status": "ok",
        "seconds": trained_s,
        "iterations_per_s": request.iterations / trained_s,
        "saves": len(blocked_s),
        "blocked_s": sum(blocked_s),
        "blocked_share": sum(blocked_s) / trained_s,
        "state_bytes": nbytes_of(trainer.state()),
        "agent_cpu_s": agent_cpu_s,
        **meter.counts,
    }


@contextmanager
def saving(request: Request) -> Iterator[tuple[Save, Wait]]:
    """What saves a step, and what waits until it is whole."""
    if request.place == NOWHERE:
        yield lambda step, state: None, lambda: None
    elif request.place == MEMORY:
        with _to_memory(request) as both:
            yield both
    else:
        yield _to_disk(request), lambda: None


def _to_disk(request: Request) -> Save:
    """Saves synchronously, and keeps the newest."""
    system = SYSTEMS[request.place]()
    system.prepare("default")
    root = Path(request.path)

    def save(step: int, state: Any) -> None:
        system.save(root / str(step), state)
        for older in root.iterdir():
            if older.name != str(step):
                shutil.rmtree(older)

    return save


@contextmanager
def _to_memory(request: Request) -> Iterator[tuple[Save, Wait]]:
    assert request.agent is not None, "memory needs an agent"
    checkpointer = checkpointer_of(request.path, request.agent[0])
    with checkpointer:
        # Each save is kept, as on the disk: `save_async` would leave out those that come too fast.
        yield lambda step, state: _saved(in_directory=checkpointer.save(step, state)), checkpointer.wait
        statistics = checkpointer.tier_statistics
        wanted = 1 + (request.iterations // request.every if request.every else 0)
        if statistics is None or statistics.saves != wanted:
            raise RuntimeError(f"memory has not taken {wanted} saves: {statistics}")


def _saved(*, in_directory: bool) -> None:
    assert not in_directory, "nothing goes to the directory"


def nbytes_of(state: Any) -> int:
    """The bytes of all arrays."""
    from waystation.tree import flatten

    leaves, _ = flatten(state)
    return sum(_nbytes(leaf) for leaf in leaves)


def _nbytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize if hasattr(leaf, "dtype") else 0


if __name__ == "__main__":
    processes.answer(Request, run)
