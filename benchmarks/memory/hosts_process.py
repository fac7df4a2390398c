"""One process of a program over several hosts that saves to their memory, or recovers from it.

`python -m benchmarks.memory.hosts_process REQUEST`, in the order of `benchmarks.distributed.process`, whose
program it is but for what it does while the clock runs. Process `i` runs on host `i` and uses its agent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.distributed import models, process, systems
from benchmarks.distributed.process import Facts
from benchmarks.measure import Meter
from benchmarks.memory.agents import checkpointer_of

STEP = 1
SAVE, RECOVER = "save-memory", "recover-memory"


@dataclass(frozen=True, slots=True)
class Request(process.Request):
    """What the processes are asked to do.

    Attributes:
        agents: The directories of the agents, host by host.
    """

    agents: list[str] = field(default_factory=list)


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    process.end_with(request, lambda: run(request))


def run(request: Request) -> Facts:
    """Measures; returns when the operation began and ended, and what it consisted of."""
    process.connect(request)
    arrays = models.describe(request.model, request.quick)
    process.warm_up(systems.prepare("waystation", {}, {}), request)
    meter = Meter()
    facts = OPERATIONS[request.operation](request, arrays, meter)
    return {
        "status": "ok",
        **meter.counts,
        **facts,
        "state_bytes": models.total_bytes(arrays),
        "arrays": len(arrays),
    }


def save(request: Request, arrays: list[models.Sharded], meter: Meter) -> Facts:
    """Saves; it is whole once enough hosts have verified copies of every shard, and have agreed on that."""
    with checkpointer_of(request.path, request.agents[request.process]) as checkpointer:
        checkpointer.save(0, process.build(models.describe("tiny", request.quick), request.mesh))
        checkpointer.wait()
        state = process.build(arrays, request.mesh)
        with meter.running():
            begin_s = process.begin(request)
            checkpointer.save_async(STEP, state)
            blocked_s = time.monotonic() - begin_s
            checkpointer.wait()
            end_s = time.monotonic()
        statistics = checkpointer.tier_statistics
        if statistics is None or statistics.failures or statistics.last_saved_step != STEP:
            raise RuntimeError(f"memory has not taken the state: {statistics}")
    return {"begin_s": begin_s, "end_s": end_s, "blocked_s": blocked_s}


def recover(request: Request, arrays: list[models.Sharded], meter: Meter) -> Facts:
    """Loads as a program that was started again: opening is a part of it, and brings lost copies back."""
    wanted = process.template(arrays, request.mesh)
    with meter.running():
        begin_s = process.begin(request)
        checkpointer = checkpointer_of(request.path, request.agents[request.process])
        opened_s = time.monotonic() - begin_s
        loaded = process.complete(checkpointer.load(None, wanted))
        end_s = time.monotonic()
    statistics = checkpointer.tier_statistics
    checkpointer.close()
    if statistics is None or statistics.loads != 1:
        raise RuntimeError(f"the state did not come from memory: {statistics}")
    process.check(arrays, loaded, request.mesh, everything=request.verify_all)
    return {"begin_s": begin_s, "end_s": end_s, "opened_s": opened_s}


OPERATIONS: dict[str, Callable[[Request, list[models.Sharded], Meter], Facts]] = {
    SAVE: save,
    RECOVER: recover,
}


if __name__ == "__main__":
    main()
