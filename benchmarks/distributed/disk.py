"""Four processes save one state together, against the raw limit of the disk that they share.

The limit is that of `benchmarks/systems/limit.py`, on as many bytes, in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.analysis import Ratio
from benchmarks.distributed import limits
from benchmarks.distributed.process import Request
from benchmarks.distributed.session import Session
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line

NAME = "disk"
PROCESSES = 4
SUBJECT = "one disk"
OURS = f"waystation, {PROCESSES} processes"
OPERATION = "save"
NEEDED = 0.8


def measure(session: Session, repetition: int) -> None:
    """One round: all ways of the limit around the save, which comes elsewhere among them each time."""
    ways = limits.SAVE_WAYS
    place = (repetition * 4 + 2) % len(ways)
    for way in ways[:place]:
        _limit(session, repetition, way)
    _save(session, repetition)
    for way in ways[place:]:
        _limit(session, repetition, way)


def _limit(session: Session, repetition: int, way: str) -> None:
    limits.measure_save(session, Case(NAME, SUBJECT, f"{limits.PREFIX}{way}", OPERATION), repetition, way)


def _save(session: Session, repetition: int) -> None:
    with session.checkpoint() as path:
        request = Request(
            system="waystation",
            operation="save",
            model="one",
            mesh=(1, PROCESSES, 1),
            devices=PROCESSES,
            processes=PROCESSES,
            path=str(path),
            quick=session.quick,
        )
        session.run(Case(NAME, SUBJECT, OURS, OPERATION), repetition, request)


def count(session: Session, rounds: int) -> int:
    """How many programs that many rounds run."""
    del session
    return rounds * (1 + len(limits.SAVE_WAYS))


def evaluate(results: Results) -> Iterator[Line]:
    """What share of the limit the processes reach together."""
    ours, limit = results.series(Case(NAME, SUBJECT, OURS, OPERATION)), limits.best(results, NAME)
    text, needed = f"{PROCESSES} processes save together: of the raw write limit", f"≥ {NEEDED:g}x"
    if ours is None or limit is None:
        yield Line(text, needed, "not measured", "", None)
        return
    ratio = Ratio.of(ours, limit)
    yield Line(text, needed, f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", ratio.median >= NEEDED)
