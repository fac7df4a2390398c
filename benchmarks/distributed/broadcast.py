"""Loads of a state that every process needs, from a slow store: all read, or one reads and sends it on.

Measured with two and four real processes; for more replicas computed from that by `Model`, whose figures for
two and four stand beside the measured ones. All processes are on one machine: the sending goes through its
memory, and shares its cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.analysis import Ratio, Series
from benchmarks.distributed import throttles
from benchmarks.distributed.process import Request
from benchmarks.distributed.replicas import save_request
from benchmarks.distributed.session import Session
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line

NAME = "broadcast"
COUNTS = (2, 4)
MODELLED = (2, 4, 8, 16, 32)
OPERATION = "load"
EVERYONE, BROADCAST, CHOSEN = "everyone reads", "load and broadcast", "chosen by itself"
ALONE = "1 replica"
MANNERS: dict[str, bool | None] = {EVERYONE: False, BROADCAST: True, CHOSEN: None}
NEEDED_AT_4 = 1.5
NEEDED_OF_BETTER = 0.9


def subject_of(processes: int) -> str:
    return f"{processes} replicas" if processes > 1 else ALONE


def measure(session: Session, repetition: int) -> None:
    """One round: a save without a limit, and the loads of it, beginning with another manner each time."""
    manners = list(MANNERS)
    shift = repetition % len(manners)
    for processes in (1, *COUNTS):
        with session.checkpoint() as path:
            saving = replace(save_request(session, path, processes), verify_all=repetition == 0)
            saved = session.run(Case(NAME, subject_of(processes), "waystation", "save"), repetition, saving)
            for manner in manners[shift:] + manners[:shift] if processes > 1 else [EVERYONE]:
                case = Case(NAME, subject_of(processes), manner, OPERATION)
                if saved:
                    _load(session, case, repetition, saving)
                else:
                    session.record(case, repetition, {"status": "failed", "reason": "nothing was saved"})


def _load(session: Session, case: Case, repetition: int, saving: Request) -> None:
    settings = throttles.store(session.directory / "throttles")
    settings["array.loading.load_and_broadcast"] = MANNERS[case.system]
    settings["array.loading.replica_axis"] = "data"
    session.run(case, repetition, replace(saving, operation="load", settings=settings))


def count(session: Session, rounds: int) -> int:
    """How many programs that many rounds run."""
    del session
    return rounds * (2 + len(COUNTS) * (1 + len(MANNERS)))


# ---- more replicas than there are processes ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """How long a load takes with any number of replicas, from what one round has measured.

    Attributes:
        state_bytes: What each replica needs.
        own_s: What a load by one replica takes beyond the store's time.
        sending_s: What sending the state to all others takes, at the most replicas that were measured. It is
            taken to be the same for more, as of a ring or tree over links that every host has of its own.
    """

    state_bytes: int
    own_s: float
    sending_s: float

    @classmethod
    def of(cls, state_bytes: int, alone_s: float, broadcast_s: float) -> Model:
        """From a load by one replica, and one by the most that were measured."""
        return cls(state_bytes, max(0.0, alone_s - _store_s(state_bytes)), max(0.0, broadcast_s - alone_s))

    def everyone_s(self, replicas: int) -> float:
        """All read from the one store."""
        return _store_s(self.state_bytes * replicas) + self.own_s

    def broadcast_s(self) -> float:
        """One reads, whatever the number of the others."""
        return _store_s(self.state_bytes) + self.own_s + self.sending_s


def _store_s(nbytes: int) -> float:
    requests = nbytes / throttles.BLOCK_BYTES
    return max(nbytes / throttles.STORE_BYTES_PER_S, requests / throttles.STORE_REQUESTS_PER_S)


def models_of(results: Results) -> list[Model]:
    """One of each round that measured what it takes."""
    alone = results.series(Case(NAME, ALONE, EVERYONE, OPERATION))
    most = results.series(Case(NAME, subject_of(COUNTS[-1]), BROADCAST, OPERATION))
    if alone is None or most is None:
        return []
    state_bytes = next(
        run["state_bytes"]
        for run in results.runs(experiment=NAME, operation=OPERATION)
        if run["status"] == "ok"
    )
    rounds = sorted(alone.values.keys() & most.values.keys())
    return [Model.of(state_bytes, alone.values[index], most.values[index]) for index in rounds]


# ---- targets -----------------------------------------------------------------------------------


def evaluate(results: Results) -> Iterator[Line]:
    """How much faster sending is than reading, and whether the choice is right."""
    return compared(results, NAME, [subject_of(processes) for processes in COUNTS], NEEDED_AT_4)


def compared(results: Results, name: str, subjects: Sequence[str], needed: float) -> Iterator[Line]:
    """The targets of an experiment that loads in each of the manners.

    Args:
        results: What was measured.
        name: Of the experiment.
        subjects: Those that load, the fewest first.
        needed: How many times as fast as reading the sending has to be for the last of them.
    """
    for subject in subjects:
        sent, read, chosen = (
            results.series(Case(name, subject, manner, OPERATION)) for manner in (BROADCAST, EVERYONE, CHOSEN)
        )
        if subject == subjects[-1]:
            yield _line(f"{subject}: {BROADCAST} faster than {EVERYONE}", needed, sent, read)
        better = min(sent, read, key=lambda series: series.median) if sent and read else None
        yield _line(
            f"{subject}: {CHOSEN}: as fast as the better of the two", NEEDED_OF_BETTER, chosen, better
        )


def _line(text: str, needed: float, own: Series | None, other: Series | None) -> Line:
    if own is None or other is None:
        return Line(text, f"≥ {needed:g}x", "not measured", "", None)
    ratio = Ratio.of(own, other)
    return Line(text, f"≥ {needed:g}x", f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", ratio.median >= needed)


def speedup(models: list[Model], replicas: int) -> float:
    """Mean of what the models say."""
    return statistics.fmean(model.everyone_s(replicas) / model.broadcast_s() for model in models)
