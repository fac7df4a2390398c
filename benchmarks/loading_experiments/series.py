"""What a cold load does to the machine while it runs: processor, disk, page cache, memory over time.

Nothing is compared here but by the eye: `series_chart.py` draws the median run of each loader.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.loading_experiments import sampler
from benchmarks.loading_experiments.models import Model
from benchmarks.loading_experiments.session import Loading, Session, in_turns
from benchmarks.processes import Outcome
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line

NAME = "series"
TITLE = "One process loads a model, cold, with samples of what the machine does"
STATE = "llama"
SUBJECT, OPERATION = "1 process", "load-cold"
MOST_GAP_S = 0.02

LOADINGS = (
    Loading("waystation-safetensors-torch", "read"),
    Loading("waystation-safetensors-jax", "read"),
    Loading("safetensors-torch", "mmap"),
    Loading("safetensors-jax", "mmap"),
    Loading("fastsafetensors", "direct"),
    Loading("runai"),
)


def case_of(loading: Loading) -> Case:
    """How a load is recorded."""
    return Case(NAME, SUBJECT, loading.system, OPERATION)


def measure(session: Session, repetition: int) -> None:
    """One round; each begins with another loader."""
    model = Model(STATE, session.quick)
    for loading in in_turns(LOADINGS, repetition):
        session.load(case_of(loading), repetition, loading, model, beside=sampler.sampling(session.directory))


def count(rounds: int) -> int:
    """How many runs that many rounds make."""
    return rounds * len(LOADINGS)


def median_run(results: Results, loading: Loading) -> Outcome | None:
    """The run whose time is nearest to the median; None if none went well."""
    case = case_of(loading)
    runs = results.runs(experiment=case.experiment, system=case.system)
    good = [run for run in runs if run["status"] == "ok"]
    if not good:
        return None
    middle = statistics.median(run["seconds"] for run in good)
    return min(good, key=lambda run: abs(run["seconds"] - middle))


def evaluate(results: Results) -> Iterator[Line]:
    """That samples are as dense as they are said to be, in the runs that are drawn."""
    runs = [run for loading in LOADINGS if (run := median_run(results, loading))]
    needed = f"≤ {MOST_GAP_S * 1e3:.0f} ms"
    text = "time series: the samples are so far apart, median and most"
    if not runs:
        yield Line(text, needed, "not measured", "", None)
        return
    gaps = [gap for run in runs for gap in sampler.gaps_s(run)]
    middle, worst = statistics.median(gaps), max(gaps)
    yield Line(text, needed, f"{middle * 1e3:.1f} ms", f"{worst * 1e3:.1f} ms", middle <= MOST_GAP_S)
