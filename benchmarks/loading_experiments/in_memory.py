"""One process loads a model from files in memory (tmpfs): what loaders cost where no disk hides it.

The limit is the plain copy of as many bytes into memory that nothing has touched, which no loader can avoid
that ends with memory of its own; one that maps copies nothing, and one that casts from 16 to 32 bits writes
twice as much, so these are compared with their like.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator

from benchmarks import measure as machine
from benchmarks.analysis import Ratio
from benchmarks.distributed import limits
from benchmarks.loading_experiments.loaders import CAST
from benchmarks.loading_experiments.models import Model
from benchmarks.loading_experiments.session import Loading, Session, best, compare, in_turns
from benchmarks.rounds import Case, Results
from benchmarks.targets import EVEN, Line

NAME = "tmpfs"
TITLE = "One process loads a model from tmpfs"
STATE = "llama-1gb"
SUBJECT, OPERATION = "files in memory", "load"
LIMIT_SUBJECT, LIMIT_OPERATION = "raw memory", "copy"
NEEDED_OF_COPY = 0.85
NEEDED_OF_MEDIAN_PEER = 1.5
MEMORY_TIMES = 6
"""So many times the bytes of the model must be free: files, what is loaded, a cast, its check, and more."""

OURS = Loading("waystation-safetensors-torch", "read")
OURS_MAPPED = Loading("waystation-safetensors-torch", "mmap")
OURS_JAX = Loading("waystation-safetensors-jax", "read")
PEERS = {
    "fastsafetensors": (Loading("fastsafetensors", "buffered"), Loading("fastsafetensors", "direct")),
    "runai": (Loading("runai"), Loading("runai", "io_uring_buffered")),
    "safetensors, read": (Loading("safetensors-torch", "pread"),),
}
MAPPED_PEERS = {"safetensors, mapped": (Loading("safetensors-torch", "mmap"),)}
JAX_PEERS = {"safetensors.flax": (Loading("safetensors-jax", "mmap"), Loading("safetensors-jax", "pread"))}
OURS_CAST = Loading("waystation-safetensors-torch", CAST)
CAST_PEERS = {"safetensors and float()": (Loading("safetensors-torch", CAST),)}
GROUPS = ((OURS, PEERS), (OURS_MAPPED, MAPPED_PEERS), (OURS_JAX, JAX_PEERS), (OURS_CAST, CAST_PEERS))


def case_of(loading: Loading) -> Case:
    """How a load is recorded."""
    return Case(NAME, SUBJECT, loading.system, OPERATION)


def loadings() -> list[Loading]:
    """All that are measured."""
    peers = [loading for _, peers in GROUPS for ways in peers.values() for loading in ways]
    return [*(ours for ours, _ in GROUPS), *peers]


def measure(session: Session, repetition: int) -> None:
    """One round; each begins with another loader."""
    for way in limits.COPY_WAYS:
        case = Case(NAME, LIMIT_SUBJECT, limits.PREFIX + way, LIMIT_OPERATION)
        limits.measure_copy(session, case, repetition, way)
    model = Model(STATE, session.quick)
    session.memory_directory.mkdir(parents=True, exist_ok=True)
    reason = _why_too_large(session, model)
    try:
        for loading in in_turns(loadings(), repetition):
            if reason is not None:
                session.record(case_of(loading), repetition, {"status": "missing", "reason": reason})
                continue
            session.load(
                case_of(loading), repetition, loading, model, parent=session.memory_directory, cold=False
            )
    finally:
        shutil.rmtree(session.memory_directory, ignore_errors=True)  # it takes memory from other experiments


def _why_too_large(session: Session, model: Model) -> str | None:
    room = shutil.disk_usage(session.memory_directory).free
    if room < model.nbytes * 5 // 4:
        return f"'{session.memory_directory}' has room for {room:,} bytes"
    available = machine.available_bytes()
    return f"{available:,} bytes of memory are free" if available < MEMORY_TIMES * model.nbytes else None


def count(rounds: int) -> int:
    """How many runs that many rounds make."""
    return rounds * (len(limits.COPY_WAYS) + len(loadings()))


def evaluate(results: Results) -> Iterator[Line]:
    """Near the copy, no slower than any peer that ends alike, and far ahead of most."""
    for ours in (OURS, OURS_JAX):
        share = limits.share(results, case_of(ours))
        text, needed = f"tmpfs, {ours.loader}: of a plain copy's speed", f"≥ {NEEDED_OF_COPY:g}x"
        measured = "not measured" if share is None else f"{share:.2f}x"
        yield Line(text, needed, measured, "", None if share is None else share >= NEEDED_OF_COPY)
    for ours, peers in GROUPS:
        for name, ways in peers.items():
            text = f"tmpfs, {ours.system if ours == OURS_CAST else ours.loader}: no slower than {name}"
            own = results.series(case_of(ours))
            yield compare(text, own, best(results, case_of(ours), ways), EVEN)
    yield _against_median(results)


def _against_median(results: Results) -> Line:
    text, needed = "tmpfs, torch: faster than the median peer that reads", f"≥ {NEEDED_OF_MEDIAN_PEER:g}x"
    own = results.series(case_of(OURS))
    found = [series for ways in PEERS.values() if (series := best(results, case_of(OURS), ways))]
    if own is None or not found:
        return Line(text, needed, "not measured", "", None)
    ratios = [Ratio.of(own, series) for series in found]
    median = statistics.median(ratio.median for ratio in ratios)
    worst = statistics.median(ratio.worst for ratio in ratios)
    return Line(text, needed, f"{median:.2f}x", f"{worst:.2f}x", median >= NEEDED_OF_MEDIAN_PEER)
