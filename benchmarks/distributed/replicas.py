"""Saves of a state that every process holds: shared out among all replicas, or written by one of them.

That one is a program of one process with the same state, so the baseline pays for nobody else. Without
replica-parallel slices Waystation still gives whole arrays to whoever has least to write, which is shown as
well. Measured where each host's link is what limits it, as in the guide, and where the store is: there
nothing can be gained by sharing, and the figure shows what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.analysis import Ratio
from benchmarks.distributed import throttles
from benchmarks.distributed.process import Request
from benchmarks.distributed.session import Session
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line

NAME = "replicas"
COUNTS = (2, 4)
LINKS, STORE = "each link limited", "the store limited"
PARALLEL, WHOLE, SINGLE = "replica-parallel", "whole arrays, shared out", "one replica"
MANNERS = (PARALLEL, WHOLE, SINGLE)
NEEDED = {2: 1.6, 4: 1.9}
DEVICES_OF_REPLICA = 2


def measure(session: Session, repetition: int) -> None:
    """One round, beginning with another manner each time."""
    shift = repetition % len(MANNERS)
    for replicas in COUNTS:
        for limited in (LINKS, STORE):
            for manner in MANNERS[shift:] + MANNERS[:shift]:
                case = Case(NAME, f"{replicas} replicas", manner, f"save, {limited}")
                _save(session, case, repetition, 1 if manner == SINGLE else replicas)


def _save(session: Session, case: Case, repetition: int, processes: int) -> None:
    directory = session.directory / "throttles"
    limits = throttles.links(directory, processes) if LINKS in case.operation else throttles.store(directory)
    with session.checkpoint() as path:
        settings = limits | {"array.saving.use_replica_parallel": case.system == PARALLEL}
        session.run(case, repetition, replace(save_request(session, path, processes), settings=settings))


def save_request(session: Session, path: Path | str, processes: int) -> Request:
    """A save of a state of which every process holds a replica."""
    return Request(
        system="waystation",
        operation="save",
        model="replicas",
        mesh=(processes, DEVICES_OF_REPLICA, 1),
        devices=processes * DEVICES_OF_REPLICA,
        processes=processes,
        path=str(path),
        quick=session.quick,
    )


def count(session: Session, rounds: int) -> int:
    """How many programs that many rounds run."""
    del session
    return rounds * len(COUNTS) * 2 * len(MANNERS)


def evaluate(results: Results) -> Iterator[Line]:
    """How much faster it is to share the writing, where links limit it."""
    for processes in COUNTS:
        own = Case(NAME, f"{processes} replicas", PARALLEL, f"save, {LINKS}")
        ours, theirs = results.series(own), results.series(replace(own, system=SINGLE))
        text = f"{processes} replicas, {LINKS}: {PARALLEL} faster than {SINGLE}"
        needed = f"≥ {NEEDED[processes]:g}x"
        if ours is None or theirs is None:
            yield Line(text, needed, "not measured", "", None)
            continue
        ratio = Ratio.of(ours, theirs)
        reached = ratio.median >= NEEDED[processes]
        yield Line(text, needed, f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", reached)
