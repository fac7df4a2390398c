"""What the real passes and the real scheduler take for a program over thousands of hosts: measured, here
and now.
"""

from __future__ import annotations

import time
from typing import Any

from waystation.runtime.devices import DeviceId
from waystation.runtime.ir import (
    Arg,
    Compute,
    Program,
    Result,
    Sharding,
    SliceShape,
    Value,
    encode,
    islands_of,
    lower,
    place,
    prepare,
    static_subgraphs,
)
from waystation.runtime.resources import Placement
from waystation.runtime.scheduling import IslandScheduler, RunKey, Submission

DEVICES_PER_HOST = 4
_RUNS = 1000
_ROWS, _COLUMNS = 32_768, 16


def lowered(hosts: int) -> dict[str, Any]:
    """Three computations over all devices; between the second and the third rows become columns."""
    devices = hosts * DEVICES_PER_HOST
    program = prepare(_program(devices))
    placements = {
        0: Placement(
            1,
            "island",
            tuple(DeviceId(f"{at // DEVICES_PER_HOST}", at % DEVICES_PER_HOST) for at in range(devices)),
        )
    }
    began_s = time.perf_counter()
    low = lower(program, placements)
    lower_s = time.perf_counter() - began_s
    subgraphs = static_subgraphs(program)
    placed = place(program, placements)
    return {
        "hosts": hosts,
        "shards": devices,
        "program_bytes": len(encode(program)),
        "lower_s": lower_s,
        "lists": len(low.hosts),
        "schedule_s": _schedule_s(),
        "messages": sum(len(islands_of(placed, part.nodes)) for part in subgraphs),
    }


def _program(devices: int) -> Program:
    by_rows = Sharding((("data", devices),), (("data",),))
    two_ways = Sharding((("rows", devices // 2), ("columns", 2)), (("rows",), ("columns",)))
    values = [Value(at, (_ROWS, _COLUMNS), "float32", 0, two_ways if at == 3 else by_rows) for at in range(4)]
    nodes = [
        Compute("step", f"{at:x}", 0, (at - 1,), (values[at].sharding,), (values[at],)) for at in range(1, 4)
    ]
    return Program("chain", (SliceShape(0, (devices,)),), (Arg("x", values[0]), *nodes, Result((3,))))


def _schedule_s() -> float:
    """Core time of the scheduler for one run: it does not know how many hosts there are."""
    scheduler = IslandScheduler("island")
    began_s = time.perf_counter()
    for run in range(_RUNS):
        key = RunKey("client", run)
        scheduler.submit(Submission(key, "program", run))
        scheduler.complete(key, 1e-3)
    return (time.perf_counter() - began_s) / _RUNS
