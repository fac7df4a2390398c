"""One operation of one system on one state, measured in this process and in no other.

`python -m benchmarks.worker REQUEST`, where REQUEST is a JSON object (see `Request`). The order is always:
import, build the state, save and load a tiny state once so that no import and no code is loaded later, settle
the page cache, run the clock, and only then check the bytes.
"""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, processes, states
from benchmarks.measure import Meter
from benchmarks.states import Leaf
from benchmarks.systems import SYSTEMS, System
from benchmarks.systems.limit import Limit, check_pages

Facts = dict[str, Any]
SPARE_BYTES = 256 << 20
OPERATIONS = ("save", "save-async", "load-cold", "load-warm", "copy")
STREAM_OPERATIONS = ("stream-cold", "stream-warm")
"""Of published models alone: one array after another, and all of them kept."""


@dataclass(frozen=True, slots=True)
class Request(processes.Request):
    """What a worker is asked to do; `path` is the checkpoint."""

    system: str
    operation: str
    way: str
    state: str
    path: str
    quick: bool = False
    verify_all: bool = False


def run(request: Request) -> Facts:
    """Measures; returns seconds, counts and the verdict of the check."""
    system = SYSTEMS[request.system]()
    system.prepare(request.way)
    leaves = states.describe(request.state, request.quick)
    meter = Meter()
    if not isinstance(system, Limit) and system.load_ways:
        warm_up(system, Path(request.scratch), request.operation)
    perform = {
        "save": measure_save,
        "save-async": measure_save_async,
        "load-cold": measure_load,
        "load-warm": measure_load,
        "stream-cold": measure_load,
        "stream-warm": measure_load,
        "copy": measure_copy,
    }[request.operation]
    extra = perform(system, leaves, request, meter)
    return {
        "status": "ok",
        "version": version_of(system),
        "state_bytes": states.total_bytes(leaves),
        "arrays": len(leaves),
        "seconds": meter.seconds,
        **meter.counts,
        **extra,
    }


def version_of(system: System) -> str | None:
    try:
        return metadata.version(system.distribution)
    except metadata.PackageNotFoundError:
        return None


def warm_up(system: System, scratch: Path, operation: str) -> None:
    """Saves and loads a tiny state, so that what a library does once per process is done."""
    leaves, path = states.describe("tiny"), scratch / "warm-up"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    state, template = system.build(leaves), system.template(leaves)
    if operation == "save-async":
        system.save_async(path, state)()
    else:
        system.save(path, state)
    if operation in STREAM_OPERATIONS:
        dict(system.stream(path))
    else:
        system.load(path, template)
    shutil.rmtree(scratch)


def measure_save(
    system: System, leaves: list[Leaf], request: Request, meter: measure.Meter
) -> dict[str, Any]:
    state, path = system.build(leaves), Path(request.path)
    measure.settle_disks(quick=request.quick)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    with meter.running():
        elsewhere = system.save(path, state)
        meter.mark("returned")
        measure.make_durable(path)
        meter.mark("durable")
    if elsewhere is not None:
        meter.seconds = {"returned": elsewhere, "durable": elsewhere}
    return stored(path)


def measure_save_async(system: System, leaves: list[Leaf], request: Request, meter: Meter) -> Facts:
    state, path = system.build(leaves), Path(request.path)
    limit = system.snapshot_limit_bytes()
    measure.settle_disks(quick=request.quick)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    with meter.running():
        wait = system.save_async(path, state)
        meter.mark("blocking")
        wait()
        meter.mark("returned")
        measure.make_durable(path)
        meter.mark("durable")
    return {**stored(path), "snapshot_limit_bytes": limit}


def stored(path: Path) -> Facts:
    return {"disk_bytes": measure.bytes_on_disk(path), "files": len(measure.files_under(path))}


def measure_load(
    system: System, leaves: list[Leaf], request: Request, meter: measure.Meter
) -> dict[str, Any]:
    path, template = Path(request.path), system.template(leaves)
    extra = stored(path)
    if request.operation.endswith("-cold"):
        extra["cache"] = measure.make_cold(path, quick=request.quick)
    else:
        measure.make_warm(path)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    cached = measure.cached_bytes(path)
    with meter.running():
        loaded: Any
        if request.operation in STREAM_OPERATIONS:
            loaded = consume(system, path, meter)
        else:
            loaded = system.load(path, template)
        meter.mark("loaded")
        views = system.views(loaded)
        meter.mark("viewed")
        measure.touch(views.values())
        meter.mark("touched")
    extra["cache_growth_bytes"] = measure.cached_bytes(path) - cached
    if isinstance(loaded, float):
        meter.seconds = {"loaded": loaded, "touched": loaded}
        return extra
    # Making the views is this benchmark's need, not the user's.
    meter.seconds["touched"] -= meter.seconds.pop("viewed") - meter.seconds["loaded"]
    if isinstance(system, Limit):
        problem = None if check_pages(views["raw"]) else "a page of the raw file is not what was written"
    else:
        problem = check(leaves, system.arrays(loaded), views, request.verify_all)
    if problem is not None:
        raise ValueError(f"{request.system} loaded wrong bytes: {problem}")
    return extra


def consume(system: System, path: Path, meter: measure.Meter) -> dict[str, Any]:
    """Takes all arrays, and keeps them; the first is in hand once its bytes are in memory."""
    taken: dict[str, Any] = {}
    for name, array in system.stream(path):
        taken[name] = array
        if len(taken) == 1:
            measure.touch(system.views(taken).values())
            meter.mark("first")
    return taken


def measure_copy(
    system: System, leaves: list[Leaf], request: Request, meter: measure.Meter
) -> dict[str, Any]:
    if not isinstance(system, Limit):
        raise ValueError("only the limit measures a plain copy")
    state = system.build(leaves)
    measure.back_free_memory(2 * states.total_bytes(leaves) + SPARE_BYTES, quick=request.quick)
    with meter.running():
        copied = system.copy(state)
        meter.mark("copied")
    return {"copied_bytes": len(copied)}


def check(leaves: list[Leaf], arrays: dict[str, Any], views: dict[str, Any], everything: bool) -> str | None:
    """Compares names, shapes, dtypes, and the bytes: of all arrays, or the largest and a few others."""
    names = {leaf.name for leaf in leaves}
    if names != arrays.keys():
        return f"names differ: {sorted(names ^ arrays.keys())[:5]}"
    for leaf in leaves:
        array = arrays[leaf.name]
        found = tuple(array.shape), str(array.dtype).removeprefix("torch.")
        if found != (leaf.shape, leaf.dtype):
            return f"array '{leaf.name}' is {found}, not {(leaf.shape, leaf.dtype)}"
    chosen = leaves
    if not everything:
        by_hash = sorted(leaves, key=lambda leaf: zlib.crc32(leaf.name.encode()))
        chosen = [*by_hash[:8], max(leaves, key=lambda leaf: leaf.nbytes)]
    for leaf in chosen:
        if not np.array_equal(states.expected(leaf), views[leaf.name]):
            return f"array '{leaf.name}' differs"
    return None


if __name__ == "__main__":
    processes.answer(Request, run)
