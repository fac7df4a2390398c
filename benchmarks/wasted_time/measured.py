"""Constants of the simulation from what `python -m benchmarks.memory` has measured.

What was measured on one machine takes the place of what was assumed; what the paper says of its machines
stays. All are rates, or independent of the size of the state, so that states of other sizes can be simulated.
A session that has not measured something leaves the constant as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.memory import checkpoints, replication
from benchmarks.rounds import Case, Results

_COMMAND = "measured: python -m benchmarks.memory"
_FRAMEWORK = "jax"


def constants_of(path: Path) -> dict[str, Any]:
    """The constants by name, each with its value and source.

    Raises:
        SystemExit: The file has no results of that command, or of small states only.
    """
    document = json.loads(path.read_text())
    if document.get("quick"):
        raise SystemExit(f"'{path}': quick results show that everything works, not how fast it is")
    found = dict(_rates(Results(document)))
    if not found:
        raise SystemExit(f"'{path}': no saves to memory were measured; run python -m benchmarks.memory")
    cores = document["machine"]["cores"]
    return {
        name: {"value": value, "source": f"{_COMMAND}, {what}, {cores} cores"}
        for name, (value, what) in found.items()
    }


def _rates(results: Results) -> Iterator[tuple[str, tuple[float, str]]]:
    saves = Case(checkpoints.NAME, _FRAMEWORK, checkpoints.MEMORY, checkpoints.SAVE)
    if rate := _bytes_per_s(results, saves):
        yield "copy_bytes_per_s", (rate, "copied and verified by the agent")
    # JAX's arrays are held by view, so what blocks is the same for a state of any size.
    if blocked := results.series(saves, "blocked_s"):
        yield "stall_s", (blocked.median, "until a save has returned")
    for case in results.cases(replication.NAME):
        rate = _bytes_per_s(results, case)
        if rate and (case.system, case.operation) == (replication.LOST_HOST, checkpoints.RECOVER):
            count = int(case.subject.split()[0])
            yield "retrieval_bytes_per_s", (rate / count, f"a host's shard from a peer, {case.subject}")


def _bytes_per_s(results: Results, case: Case) -> float | None:
    seconds, nbytes = results.series(case), results.series(case, "state_bytes")
    return nbytes.median / seconds.median if seconds and nbytes else None
