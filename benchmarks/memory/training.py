"""Training with saves: to memory and, synchronously, to the disk; at no, every 25th and every iteration.

Every run is a fresh process that trains for the same number of iterations; all are run once in a round.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from benchmarks.memory import agents
from benchmarks.memory.agents import Agent
from benchmarks.memory.trainers import SIZES
from benchmarks.memory.training_process import MEMORY, NOWHERE, Request
from benchmarks.rounds import Case, Results, Session

NAME = "training"
DISK = {"torch": "torch-save", "jax": "orbax"}
INTERVALS = (25, 1)
NO_SAVES = "-"


def cases(frameworks: Sequence[str]) -> list[Case]:
    """What a round consists of."""
    found = []
    for framework in frameworks:
        found.append(Case(NAME, framework, NOWHERE, NO_SAVES))
        found += [
            Case(NAME, framework, place, f"every {every}")
            for every in INTERVALS
            for place in (MEMORY, DISK[framework])
        ]
    return found


def measure_rounds(
    session: Session, size: str, frameworks: Sequence[str], rounds: int, iterations: int
) -> None:
    """Trains in all ways, round after round, beside one agent."""
    wanted = cases(frameworks)
    with agents.running(SIZES[size].state_bytes) as agent:
        for repetition in range(rounds):
            first = repetition * len(wanted) // max(rounds, 1)
            for case in (*wanted[first:], *wanted[:first]):
                train(session, case, repetition, size, iterations, agent)


def every_of(case: Case) -> int:
    """From how many iterations to how many there is a save; 0 for none."""
    return 0 if case.operation == NO_SAVES else int(case.operation.removeprefix("every "))


def train(session: Session, case: Case, repetition: int, size: str, iterations: int, agent: Agent) -> None:
    # One sequence for both frameworks: whoever comes next makes the earlier versions give way.
    path = session.directory / ("in-memory" if case.system == MEMORY else "checkpoint")
    shutil.rmtree(path, ignore_errors=True)

    request = Request(
        framework=case.subject,
        size=size,
        place=case.system,
        every=every_of(case),
        iterations=iterations,
        path=str(path),
        output=session.output,
        agent=(str(agent.directory), agent.process) if case.system == MEMORY else None,
    )
    session.record(case, repetition, session.spawn("benchmarks.memory.training_process", request))
    shutil.rmtree(path, ignore_errors=True)


def step_s(results: Results, framework: str) -> float | None:
    """How long an iteration takes without saves."""
    rate = results.series(Case(NAME, framework, NOWHERE, NO_SAVES), "iterations_per_s")
    return None if rate is None else 1 / rate.median
