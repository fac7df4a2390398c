"""One process of a program that saves or loads once: `python -m benchmarks.distributed.process REQUEST`.

The order is always: connect, build the state or the template, save and load a tiny state over the same
mesh so that nothing is imported, compiled or connected later, begin to count, say `ready` to the pipe that
the request names, wait for a line on standard input, run the clock, and only then check the bytes. The
outcome is written as JSON to the request's `output`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import processes, states
from benchmarks.distributed import models, systems
from benchmarks.distributed.models import AXES, Mesh, Sharded
from benchmarks.distributed.systems import Chunking, Library
from benchmarks.measure import Meter
from benchmarks.storage.systems import reach

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request(processes.Request):
    """What the processes of a program are asked to do; the last three are each process's own.

    Attributes:
        system: See `systems.prepare`.
        operation: `save`, `load` (cold) or `load-warm`.
        model: See `models.MODELS`.
        mesh: Over which devices the arrays are spread, process by process.
        devices: Of all processes together; more than the mesh has where a part of them is used.
        processes: How many there are.
        path: Of the checkpoint: a directory, or a location beneath a bucket.
        endpoint: Of the server that has the bucket.
        chunking: How arrays are to be cut when they are saved, by name.
        settings: Options of Waystation by their dotted names; `{process}` in a text becomes the number of
            the process.
        quick: Whether the small states are meant.
        verify_all: Whether every array is to be checked after a load, or one.
    """

    system: str
    operation: str
    model: str
    mesh: Mesh
    devices: int
    processes: int
    path: str
    chunking: dict[str, Chunking] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    verify_all: bool = False
    endpoint: str = ""
    process: int = 0
    coordinator: str = ""
    ready: int = -1


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    end_with(request, lambda: run(request))


def end_with(request: Request, work: Callable[[], Facts]) -> None:
    """Works with the devices of the request, and writes the outcome."""
    local = request.devices // request.processes
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={local}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    outcome = processes.attempt(work)
    Path(request.output).write_text(json.dumps(outcome))
    sys.stdout.flush()
    if outcome["status"] != "ok":
        os._exit(1)  # the others may wait for this process, and this one for them


def run(request: Request) -> Facts:
    """Measures; returns when the operation began and ended, counts, and what the library says."""
    connect(request)
    if request.endpoint:
        reach(request.endpoint)
    settings = {
        name: value.format(process=request.process) if isinstance(value, str) else value
        for name, value in request.settings.items()
    }
    library = systems.prepare(request.system, request.chunking, settings)
    arrays = models.describe(request.model, request.quick)
    subject = build(arrays, request.mesh) if request.operation == "save" else template(arrays, request.mesh)
    # Whoever chooses by itself may come to broadcast: that is connected and compiled before, as for who must.
    warming = {name: True if value is None else value for name, value in settings.items()}
    warm_up(systems.prepare(request.system, request.chunking, warming), request)
    library.statistics.clear()
    meter, path = Meter(), request.path if request.endpoint else Path(request.path)
    loaded = None
    with meter.running():
        begin_s = begin(request)
        if request.operation == "save":
            library.save(path, subject)
        else:
            loaded = complete(library.load(path, subject))
        end_s = time.monotonic()
    if loaded is not None:
        check(arrays, loaded, request.mesh, everything=request.verify_all)
    facts = {"status": "ok", "begin_s": begin_s, "end_s": end_s, **meter.counts}
    facts["state_bytes"] = models.total_bytes(arrays)
    facts["arrays"] = len(arrays)
    if library.statistics:
        facts["bytes_read"] = sum(found.bytes_read for found in library.statistics)
        # Of files: what another process has sent was needed from these once.
        facts["bytes_needed"] = sum(found.bytes_needed - found.bytes_received for found in library.statistics)
    return facts


def begin(request: Request) -> float:
    """Waits until all processes are ready; returns when it was so.

    To be called when the meter runs: what it does first takes each process another while, and is not to make
    one wait for another.
    """
    os.write(request.ready, b"r")
    sys.stdin.readline()
    return time.monotonic()


def connect(request: Request) -> None:
    """Joins the other processes."""
    import jax

    if request.processes > 1:
        jax.distributed.initialize(request.coordinator, request.processes, request.process)
    if jax.device_count() != request.devices:
        raise RuntimeError(f"{jax.device_count()} devices are there, not {request.devices}")


def warm_up(library: Library, request: Request) -> None:
    """Saves and loads a tiny state, so that nothing is imported, compiled or connected later."""
    tiny = models.describe("tiny", request.quick)
    path = Path(request.scratch)
    library.save(path, build(tiny, request.mesh))
    complete(library.load(path, template(tiny, request.mesh)))


def complete(loaded: Any) -> Any:
    """The same, once every array is there."""
    import jax

    return jax.block_until_ready(loaded)


# ---- arrays ------------------------------------------------------------------------------------


def sharding_of(array: Sharded, mesh: Mesh) -> Any:
    """The sharding of an array over a mesh of the first devices."""
    import jax

    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    spec = jax.sharding.PartitionSpec(*array.spec)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices, AXES), spec)


def build(arrays: list[Sharded], mesh: Mesh) -> Any:
    """The state, each device with its part."""
    import jax

    flat = {array.leaf.name: _build_array(array, sharding_of(array, mesh)) for array in arrays}
    return jax.block_until_ready(states.nest(flat))


def _build_array(array: Sharded, sharding: Any) -> Any:
    import jax

    values = expected(array)
    return jax.make_array_from_callback(array.leaf.shape, sharding, lambda index: np.asarray(values[index]))


def template(arrays: list[Sharded], mesh: Mesh) -> Any:
    """What a load is given: shapes, dtypes and shardings."""
    import jax

    flat = {
        array.leaf.name: jax.ShapeDtypeStruct(
            array.leaf.shape, expected_dtype(array), sharding=sharding_of(array, mesh)
        )
        for array in arrays
    }
    return states.nest(flat)


def expected_dtype(array: Sharded) -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if array.leaf.dtype == "bfloat16" else array.leaf.dtype)


def expected(array: Sharded) -> Any:
    return states.expected(array.leaf).view(expected_dtype(array)).reshape(array.leaf.shape)


def check(arrays: list[Sharded], loaded: Any, mesh: Mesh, *, everything: bool) -> None:
    """Compares what the devices of this process hold with what was saved: of all arrays, or of the largest.

    Raises:
        ValueError: It differs.
    """
    found = states.flatten(loaded)
    names = {array.leaf.name for array in arrays}
    if names != found.keys():
        raise ValueError(f"names differ: {sorted(names ^ found.keys())[:5]}")
    for array in arrays if everything else [max(arrays, key=lambda array: array.leaf.nbytes)]:
        own, values = found[array.leaf.name], expected(array)
        if not own.sharding.is_equivalent_to(sharding_of(array, mesh), len(array.leaf.shape)):
            raise ValueError(f"array '{array.leaf.name}' has the sharding {own.sharding}")
        for shard in own.addressable_shards:
            wanted = np.ascontiguousarray(values[shard.index])
            if np.asarray(shard.data).tobytes() != wanted.tobytes():
                raise ValueError(f"array '{array.leaf.name}' differs on {shard.device}")


if __name__ == "__main__":
    main()
