"""One process loads a model, cold, beside jobs that copy memory, as in the fastsafetensors paper.

Shown is the share of its undisturbed speed that each loader keeps, and the share of theirs that the jobs keep
while it loads: a loader that takes all cores is quick at the cost of its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.analysis import Ratio
from benchmarks.loading_experiments import copy_jobs
from benchmarks.loading_experiments.models import Model
from benchmarks.loading_experiments.session import Loading, Session, best, compare, in_turns
from benchmarks.rounds import Case, Results
from benchmarks.targets import EVEN, Line

NAME = "beside-copies"
TITLE = "One process loads a model, cold, beside jobs that copy memory"
STATE = "llama-1gb"
JOBS = (0, 1, 2, 4)
OPERATION = "load-cold"
NOTHING = "no load"

OURS = Loading("waystation-safetensors-torch", "read")
OURS_JAX = Loading("waystation-safetensors-jax", "read")
PEERS = {
    "fastsafetensors": (Loading("fastsafetensors", "buffered"), Loading("fastsafetensors", "direct")),
    "runai": (Loading("runai"),),
    "safetensors, read": (Loading("safetensors-torch", "pread"),),
}
MAPPED = Loading("safetensors-torch", "mmap")
JAX_PEERS = {"safetensors.flax": (Loading("safetensors-jax", "mmap"),)}
GROUPS = ((OURS, PEERS), (OURS_JAX, JAX_PEERS))


def subject_of(jobs: int) -> str:
    return f"{jobs} job{'' if jobs == 1 else 's'}"


def case_of(loading: Loading, jobs: int) -> Case:
    """How a load is recorded."""
    return Case(NAME, subject_of(jobs), loading.system, OPERATION)


def nothing_of(jobs: int) -> Case:
    """How the jobs alone are recorded."""
    return Case(NAME, subject_of(jobs), NOTHING, OPERATION)


def loadings() -> list[Loading]:
    """All that are measured."""
    return [
        OURS,
        OURS_JAX,
        MAPPED,
        *(loading for _, peers in GROUPS for ways in peers.values() for loading in ways),
    ]


def measure(session: Session, repetition: int) -> None:
    """One round; each begins with another loader."""
    model = Model(STATE, session.quick)
    for jobs in JOBS:
        if jobs:
            session.record(nothing_of(jobs), repetition, copy_jobs.undisturbed(jobs))
        for loading in in_turns(loadings(), repetition):
            beside = copy_jobs.copying(jobs, 2 * model.nbytes)
            session.load(case_of(loading, jobs), repetition, loading, model, beside=beside)


def count(rounds: int) -> int:
    """How many runs that many rounds make."""
    return rounds * (len(JOBS) * len(loadings()) + len(JOBS) - 1)


def kept_share(results: Results, case: Case) -> float | None:
    """What share of its undisturbed speed a loader keeps."""
    before = results.series(Case(NAME, subject_of(0), case.system, OPERATION))
    own = results.series(case)
    return Ratio.of(own, before).median if own is not None and before is not None else None


def jobs_share(results: Results, case: Case) -> float | None:
    """What share of their undisturbed speed the jobs keep."""
    alone = results.series(Case(NAME, case.subject, NOTHING, OPERATION), "filled_bytes_per_s")
    own = results.series(case, "filled_bytes_per_s")
    return own.median / alone.median if own is not None and alone is not None else None


def evaluate(results: Results) -> Iterator[Line]:
    """No slower than any peer that reads, also beside the most jobs."""
    for jobs in JOBS:
        for ours, peers in GROUPS:
            case = case_of(ours, jobs)
            for name, ways in peers.items():
                text = f"beside {subject_of(jobs)}: {ours.loader} no slower than {name}"
                yield compare(text, results.series(case), best(results, case, ways), EVEN)
