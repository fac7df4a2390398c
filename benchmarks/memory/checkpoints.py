"""Saves and recoveries of one host: to its disk, by each library; to its memory; to a slow store.

Everything is measured once in a round, in turns that begin elsewhere in each. Disk operations are those of
`benchmarks.worker`, the others those of `benchmarks.memory.process`; all are fresh processes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measure, states
from benchmarks.distributed import throttles
from benchmarks.memory import agents
from benchmarks.memory.agents import Agent
from benchmarks.memory.process import Request
from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Session
from benchmarks.systems import SYSTEMS
from benchmarks.systems.limit import Limit
from benchmarks.worker import Request as WorkerRequest

NAME = "checkpoints"
OURS = {"torch": "waystation-torch", "jax": "waystation"}
ON_DISK = {
    "torch": ("torch-save", "torch-dcp", "waystation-torch"),
    "jax": ("orbax", "orbax-plain", "waystation"),
}
MEMORY, STORE = "own memory", "store of 0.3 GB/s"
FIRST = "own memory, first of a process"
LIMIT = "limit"
TOUCHED, UNTOUCHED = "copy to touched memory", "copy to untouched memory"
SAVE, RECOVER, RECOVER_WARM = "save", "recover", "recover, files cached"
INTO, INTO_WARM = "recover into tensors", "recover into tensors, files cached"
"""Into those that the program has, not new ones: what `load_state_dict` of a module needs."""
STORE_BYTES_PER_S = 300_000_000
"""What the reproduction's figures imply: 2.5 GB in 7 to 9 seconds."""
# Of the raw loops the best on most disks, and the plain copies.
_WRITE_WAYS = ("threads direct 1 MiB x1", "threads direct 8 MiB x1", "threads buffered 8 MiB x1")
_READ_WAYS = ("threads direct 1 MiB x4", "threads buffered 1 MiB x4", "threads direct 8 MiB x2")
_COPY_THREADS = (1, 2)
_CLOCKS = {"save": "durable", "load-cold": "touched", "load-warm": "touched", "copy": "copied"}
_LOADS = {"load-cold": RECOVER, "load-warm": RECOVER_WARM}


@dataclass(frozen=True, slots=True)
class Bench:
    """What the turns of a session have in common.

    Attributes:
        state: Of `states.STATES`.
        frameworks: Whose arrays are saved.
        agent: The agent of this host.
    """

    session: Session
    state: str
    frameworks: Sequence[str]
    agent: Agent


Turn = Callable[[int], None]


def turns(bench: Bench) -> list[Turn]:
    """What a round consists of; each is given its number."""
    found: list[Turn] = []
    for framework in bench.frameworks:
        found += [partial(on_disk, bench, framework, name) for name in ON_DISK[framework]]
        found += [partial(in_memory, bench, framework), partial(in_store, bench, framework)]
    found += [partial(_raw, bench, way) for way in _WRITE_WAYS]
    found += [partial(_raw_reads, bench), partial(_copies, bench)]
    return found


def measure_rounds(session: Session, state: str, frameworks: Sequence[str], rounds: int) -> None:
    """Measures everything, round after round, beside one agent."""
    nbytes = states.total_bytes(states.describe(state, session.quick))
    with agents.running(nbytes) as agent:
        found = turns(Bench(session, state, frameworks, agent))
        for repetition in range(rounds):
            first = repetition * len(found) // max(rounds, 1)
            for turn in (*found[first:], *found[:first]):
                turn(repetition)


def count(frameworks: Sequence[str], rounds: int) -> int:
    """How many runs that are."""
    into = {"torch": 2 * len(ON_DISK["torch"]) + 2}
    of_framework = sum(3 * len(ON_DISK[name]) + 5 + into.get(name, 0) for name in frameworks)
    limits = len(_WRITE_WAYS) + len(_READ_WAYS) + len(_COPY_THREADS) + len(Limit.copy_ways)
    return rounds * (of_framework + limits)


# ---- disk --------------------------------------------------------------------------------------


def on_disk(bench: Bench, framework: str, system: str, repetition: int) -> None:
    """A save, and recoveries from what it has left: with its files not in the page cache, and in it."""
    with bench.session.checkpoint() as path:
        saved = _work(bench, Case(NAME, framework, system, SAVE), repetition, "save", path=path)
        for name in (INTO, INTO_WARM) if framework == "torch" and saved["status"] == "ok" else ():
            case = Case(NAME, framework, system, name)
            run_process(bench, case, repetition, "recover-disk-into", path, is_cached=name == INTO_WARM)
        for operation, name in _LOADS.items():
            case = Case(NAME, framework, system, name)
            if saved["status"] == "ok":
                _work(bench, case, repetition, operation, path=path, way=SYSTEMS[system].load_ways[0])
            else:
                bench.session.record(case, repetition, saved)


def _raw(bench: Bench, way: str, repetition: int) -> None:
    with bench.session.checkpoint() as path:
        _work(bench, Case(NAME, LIMIT, way, "raw write"), repetition, "save", path=path, way=way)


def _raw_reads(bench: Bench, repetition: int) -> None:
    with bench.session.checkpoint() as path:
        written = _worker(bench, Limit.name, "save", _WRITE_WAYS[0], path, repetition)
        for way in _READ_WAYS:
            case = Case(NAME, LIMIT, way, "raw read")
            if written["status"] == "ok":
                _work(bench, case, repetition, "load-cold", path=path, way=way)
            else:
                bench.session.record(case, repetition, written)


def _work(
    bench: Bench, case: Case, repetition: int, operation: str, *, path: Path, way: str = "default"
) -> Outcome:
    """Measures by a worker and records that."""
    system = Limit.name if case.subject == LIMIT else case.system
    outcome = _worker(bench, system, operation, way, path, repetition)
    bench.session.record(case, repetition, outcome)
    return outcome


def _worker(bench: Bench, system: str, operation: str, way: str, path: Path, repetition: int) -> Outcome:
    session = bench.session
    request = WorkerRequest(
        system=system,
        operation=operation,
        way=way,
        state=bench.state,
        path=str(path),
        scratch=session.scratch,
        output=session.output,
        quick=session.quick,
        verify_all=repetition == 0,
    )
    outcome = session.spawn("benchmarks.worker", request)
    if outcome["status"] == "ok":
        outcome["seconds"] = outcome["seconds"][_CLOCKS[operation]]
    return _with_cpu_per_gb(outcome)


def _with_cpu_per_gb(outcome: Outcome) -> Outcome:
    """Adds the processor seconds of the process and the agent for each GB of the state."""
    if outcome["status"] != "ok":
        return outcome
    cpu_s = outcome["cpu_s"] + outcome.get("agent_cpu_s", 0.0)
    return {**outcome, "cpu_s_per_gb": cpu_s / (outcome["state_bytes"] / 1e9)}


# ---- memory and the store ----------------------------------------------------------------------


def in_memory(bench: Bench, framework: str, repetition: int) -> None:
    """Saves to memory, whose processes are killed, and the recovery of the next process."""
    # One sequence for all: whoever comes next makes the earlier versions give way.
    path = bench.session.directory / "in-memory"
    run_process(bench, Case(NAME, framework, FIRST, SAVE), repetition, "first-save-memory", path)
    shutil.rmtree(path, ignore_errors=True)
    for operation, name in _operations(framework, "memory"):
        run_process(bench, Case(NAME, framework, MEMORY, name), repetition, operation, path)
    shutil.rmtree(path, ignore_errors=True)


def in_store(bench: Bench, framework: str, repetition: int) -> None:
    settings = throttles.store(bench.session.directory, STORE_BYTES_PER_S, None)
    with bench.session.checkpoint() as path:
        for operation, name in _operations(framework, "store"):
            run_process(bench, Case(NAME, framework, STORE, name), repetition, operation, path, settings)
            measure.make_cold(path, quick=bench.session.quick)


def _operations(framework: str, place: str) -> list[tuple[str, str]]:
    """A save and the recoveries from it: what processes do, and what that is called."""
    found = [(f"save-{place}", SAVE), (f"recover-{place}", RECOVER)]
    return [*found, (f"recover-{place}-into", INTO)] if framework == "torch" else found


def _copies(bench: Bench, repetition: int) -> None:
    """Plain copies: to memory that was touched, as slots are, and to memory that was not, as arrays are."""
    path = bench.session.directory / "copies"
    for threads in _COPY_THREADS:
        case = Case(NAME, LIMIT, f"{threads} threads", TOUCHED)
        run_process(bench, case, repetition, "copy", path, threads=threads)
    for way in Limit.copy_ways:
        case = Case(NAME, LIMIT, way, UNTOUCHED)
        _work(bench, case, repetition, "copy", path=path, way=way)


def run_process(
    bench: Bench,
    case: Case,
    repetition: int,
    operation: str,
    path: Path,
    settings: dict[str, Any] | None = None,
    threads: int = 1,
    *,
    is_cached: bool = False,
) -> None:
    session = bench.session
    request = Request(
        system=case.system if case.system in SYSTEMS else OURS.get(case.subject, Limit.name),
        operation=operation,
        state=bench.state,
        path=str(path),
        scratch=session.scratch,
        output=session.output,
        started_s=time.monotonic(),
        agent=(str(bench.agent.directory), bench.agent.process),
        settings=settings or {},
        threads=threads,
        is_cached=is_cached,
        quick=session.quick,
        verify_all=repetition == 0,
    )
    outcome = session.spawn("benchmarks.memory.process", request)
    session.record(case, repetition, _with_cpu_per_gb(outcome))
