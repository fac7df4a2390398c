"""One save or load of one system: `python -m benchmarks.storage.process REQUEST`.

The order is always: import, build the state, save and load a tiny state so that nothing is imported or
connected later, run the clock, and only then check the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure, processes, states
from benchmarks.measure import Meter
from benchmarks.storage import systems
from benchmarks.systems.base import DEFAULT
from benchmarks.worker import SPARE_BYTES, check, version_of


@dataclass(frozen=True, slots=True)
class Request(processes.Request):
    """What the process is asked to do.

    Attributes:
        system: See `systems.SYSTEMS`.
        operation: `save` or `load`.
        state: See `states.STATES`.
        path: Beneath the bucket.
        endpoint: Of the server, or of a link to it.
        quick: Whether the small states are meant.
        verify_all: Whether every array is to be checked after a load, or some.
    """

    system: str
    operation: str
    state: str
    path: str
    endpoint: str
    quick: bool = False
    verify_all: bool = False


def run(request: Request) -> dict[str, Any]:
    """Measures; returns the seconds, and counts."""
    systems.reach(request.endpoint)
    system = systems.SYSTEMS[request.system]()
    system.prepare(DEFAULT)
    leaves, path = states.describe(request.state, request.quick), Path(request.path)
    _warm_up(system, Path(f"{request.path}-{request.operation}-warm-up"))
    meter = Meter()
    nbytes = states.total_bytes(leaves)
    if request.operation == "save":
        state = system.build(leaves)
        measure.settle_disks(quick=request.quick)
        measure.back_free_memory(2 * nbytes + SPARE_BYTES, quick=request.quick)
        with meter.running():
            system.save(path, state)
            meter.mark("seconds")
    else:
        template = system.template(leaves)
        measure.back_free_memory(2 * nbytes + SPARE_BYTES, quick=request.quick)
        with meter.running():
            loaded = system.load(path, template)
            measure.touch(system.views(loaded).values())
            meter.mark("seconds")
        problem = check(leaves, system.arrays(loaded), system.views(loaded), request.verify_all)
        if problem is not None:
            raise ValueError(f"{request.system} loaded wrong bytes: {problem}")
    return {
        "status": "ok",
        "version": version_of(system),
        "state_bytes": nbytes,
        "arrays": len(leaves),
        **meter.seconds,
        **meter.counts,
    }


def _warm_up(system: systems.StoreSystem, path: Path) -> None:
    leaves = states.describe("tiny")
    writer = systems.SYSTEMS[system.writer]()
    writer.prepare(DEFAULT)
    writer.save(path, writer.build(leaves))
    if system.load_ways:
        system.load(path, system.template(leaves))


if __name__ == "__main__":
    processes.answer(Request, run)
