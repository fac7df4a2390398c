"""One operation of Waystation in memory, or through a slow store, in this process and in no other.

`python -m benchmarks.memory.process REQUEST`. The order is that of `benchmarks.worker`: import, build the
state or the template, warm up, run the clock, and only then check the bytes. A process that has saved to
memory ends by SIGKILL, so what is recovered afterwards is what the death of a program leaves.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import measure, processes, states
from benchmarks.distributed.systems import configure
from benchmarks.measure import Meter
from benchmarks.memory.agents import VERSIONS, Agent, checkpointer_of
from benchmarks.states import Leaf
from benchmarks.systems import SYSTEMS, System
from benchmarks.systems.base import TorchSystem
from benchmarks.systems.limit import fresh_memory, in_parallel
from benchmarks.systems.waystation import in_place
from benchmarks.worker import check, version_of, warm_up

if TYPE_CHECKING:
    from waystation.training import Checkpointer

Facts = dict[str, Any]
SPARE_BYTES = 256 << 20
SLOTS = VERSIONS + 1
_ENDED_BY_KILL = ("save-memory", "first-save-memory")


@dataclass(frozen=True, slots=True)
class Request(processes.Request):
    """What a process is asked to do.

    Attributes:
        system: Of `SYSTEMS`; says whose arrays they are.
        operation: See `OPERATIONS`.
        state: See `states.STATES`.
        path: The directory of the checkpoints; of a store, the checkpoint.
        started_s: When the process was started, by `time.monotonic`.
        agent: Directory and process of the agent, where memory is used.
        settings: Options of Waystation by their dotted names, where a store is used.
        threads: That copy.
        is_cached: Whether files are in the page cache.
    """

    system: str
    operation: str
    state: str
    path: str
    started_s: float
    agent: tuple[str, int] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    threads: int = 1
    is_cached: bool = False
    quick: bool = False
    verify_all: bool = False


def main() -> None:
    request = processes.answer(Request, run)
    if request.operation in _ENDED_BY_KILL:
        os.kill(os.getpid(), signal.SIGKILL)


def run(request: Request) -> Facts:
    """Measures; returns seconds and counts."""
    system = SYSTEMS[request.system]()
    system.prepare("read")
    import_s = time.monotonic() - request.started_s
    leaves = states.describe(request.state, request.quick)
    meter = Meter()
    extra = OPERATIONS[request.operation](system, leaves, request, meter)
    return {
        "status": "ok",
        "version": version_of(system),
        "state_bytes": states.total_bytes(leaves),
        "import_s": import_s,
        **{f"{name}_s": seconds for name, seconds in meter.seconds.items()},
        **meter.counts,
        **extra,
    }


# ---- memory ------------------------------------------------------------------------------------


def save_to_memory(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """Saves as a program that trains does: `blocked` until it may go on, `sealed` until all is verified.

    Every slot has had the state from this process before, so that its pages are mapped.
    """
    return _save_to_memory(system, leaves, request, meter, SLOTS)


def save_first_to_memory(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """The first save of a process, which also maps the slot that it is given."""
    return _save_to_memory(system, leaves, request, meter, 0)


def _save_to_memory(
    system: System, leaves: list[Leaf], request: Request, meter: Meter, saves_before: int
) -> Facts:
    agent = _agent(request)
    with checkpointer_of(request.path, str(agent.directory)) as checkpointer:
        checkpointer.save(0, system.build(states.describe("tiny")))
        checkpointer.wait()
        state = system.build(leaves)
        for step in range(1, 1 + saves_before):
            checkpointer.save(step, state)
        checkpointer.wait()
        measure.back_free_memory(states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
        agent_cpu_s = agent.cpu_seconds()
        last = 1 + saves_before
        with meter.running():
            checkpointer.save_async(last, state)
            meter.mark("blocked")
            checkpointer.wait()
            meter.mark("sealed")
        agent_cpu_s = agent.cpu_seconds() - agent_cpu_s
        statistics = checkpointer.tier_statistics
        if statistics is None or statistics.failures or statistics.last_saved_step != last:
            raise RuntimeError(f"memory has not taken the state: {statistics}")
    return {"agent_cpu_s": agent_cpu_s, "seconds": meter.seconds["sealed"]}


def recover_from_memory(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """Loads as a program that was started again: `opened` is a part of it."""
    template = system.template(leaves)
    return _recover(system, leaves, request, meter, lambda saved: _ready(saved.load(None, template)))


def recover_from_memory_into(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """The same into the tensors that a program has that was started again."""
    own = _torch(system).zeros(leaves)

    def load(saved: Checkpointer) -> Any:
        saved.load(None, own)
        return own

    with in_place():
        return _recover(system, leaves, request, meter, load)


def _recover(
    system: System, leaves: list[Leaf], request: Request, meter: Meter, load: Callable[[Checkpointer], Any]
) -> Facts:
    warm_up(system, Path(request.scratch), "load-warm")
    agent = _agent(request)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    agent_cpu_s = agent.cpu_seconds()
    with meter.running():
        checkpointer = checkpointer_of(request.path, str(agent.directory))
        meter.mark("opened")
        loaded = load(checkpointer)
        meter.mark("loaded")
    agent_cpu_s = agent.cpu_seconds() - agent_cpu_s
    statistics = checkpointer.tier_statistics
    checkpointer.close()
    if statistics is None or statistics.loads != 1:
        raise RuntimeError(f"the state did not come from memory: {statistics}")
    _check(system, leaves, loaded, request)
    return {"agent_cpu_s": agent_cpu_s, "seconds": meter.seconds["loaded"]}


def _torch(system: System) -> TorchSystem:
    if not isinstance(system, TorchSystem):
        raise ValueError(f"'{system.name}' has no tensors to be loaded into")
    return system


def _agent(request: Request) -> Agent:
    assert request.agent is not None, "memory needs an agent"
    directory, process = request.agent
    return Agent(Path(directory), process)


# ---- the disk ----------------------------------------------------------------------------------


def recover_from_disk_into(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """Loads from the disk into the tensors that a program has."""
    own = _torch(system).zeros(leaves)
    warm_up(system, Path(request.scratch), "load-warm")
    path = Path(request.path)
    if request.is_cached:
        measure.make_warm(path)
    else:
        measure.make_cold(path, quick=request.quick)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    with meter.running():
        _torch(system).load_into(path, own)
        meter.mark("loaded")
    _check(system, leaves, own, request)
    return {"seconds": meter.seconds["loaded"]}


# ---- a slow store ------------------------------------------------------------------------------


def save_to_store(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """Saves synchronously to a directory whose disk is throttled."""
    import waystation

    context = waystation.Context()
    warm_up(system, Path(request.scratch), "save")
    state = system.build(leaves)
    configure(context, request.settings)
    measure.settle_disks(quick=request.quick)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    with context, meter.running():
        waystation.save(request.path, state)
        meter.mark("durable")
    return {"seconds": meter.seconds["durable"]}


def recover_from_store(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """Loads from a directory whose disk is throttled."""
    import waystation

    context = waystation.Context()
    template = system.template(leaves)
    warm_up(system, Path(request.scratch), "load-warm")
    configure(context, request.settings)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    with context, meter.running():
        loaded = _ready(waystation.load(request.path, template))
        meter.mark("loaded")
    _check(system, leaves, loaded, request)
    return {"seconds": meter.seconds["loaded"]}


def recover_from_store_into(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """The same into the tensors that a program has."""
    import waystation

    own = _torch(system).zeros(leaves)
    warm_up(system, Path(request.scratch), "load-warm")
    context = waystation.Context()
    context.array.loading.in_place = True
    configure(context, request.settings)
    measure.settle_disks(quick=request.quick)
    with context, meter.running():
        waystation.load(request.path, own)
        meter.mark("loaded")
    _check(system, leaves, own, request)
    return {"seconds": meter.seconds["loaded"]}


# ---- the limit ---------------------------------------------------------------------------------


def copy(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    """Copies as many bytes to memory that was touched before, which is what slots are."""
    del system
    nbytes = states.total_bytes(leaves)
    source, target = (np.frombuffer(fresh_memory(nbytes), np.uint8) for _ in range(2))
    states.fill(Leaf("raw", (nbytes // 4,), "float32"), source[: nbytes // 4 * 4])
    target[:] = 1
    with meter.running():
        in_parallel(
            request.threads, nbytes, lambda begin, end: np.copyto(target[begin:end], source[begin:end])
        )
        meter.mark("copied")
    if not np.array_equal(source, target):
        raise ValueError("the copy differs")
    return {"seconds": meter.seconds["copied"]}


OPERATIONS: dict[str, Callable[[System, list[Leaf], Request, Meter], Facts]] = {
    "save-memory": save_to_memory,
    "first-save-memory": save_first_to_memory,
    "recover-memory": recover_from_memory,
    "recover-memory-into": recover_from_memory_into,
    "recover-disk-into": recover_from_disk_into,
    "save-store": save_to_store,
    "recover-store": recover_from_store,
    "recover-store-into": recover_from_store_into,
    "copy": copy,
}


def _ready(loaded: Any) -> Any:
    """Waits for JAX's arrays; torch's are there."""
    if "jax" in sys.modules:
        import jax

        return jax.block_until_ready(loaded)
    return loaded


def _check(system: System, leaves: list[Leaf], loaded: Any, request: Request) -> None:
    problem = check(leaves, system.arrays(loaded), system.views(loaded), request.verify_all)
    if problem is not None:
        raise ValueError(f"wrong bytes were loaded: {problem}")


if __name__ == "__main__":
    main()
