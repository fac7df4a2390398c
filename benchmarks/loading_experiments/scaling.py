"""Several processes load one model: each all of it, or each its block of rows.

Strong scaling loads the same model by more processes, weak scaling blocks of one that grows with them; the
whole model by four processes is in both. torch is connected by gloo, JAX by `jax.distributed`; all is cold
and on one machine, so processes share its disk, its cores and its page cache. What the disk has really read
is counted twice: by the kernel for each process, and by the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.distributed import limits
from benchmarks.loading_experiments.loaders import LOADERS
from benchmarks.loading_experiments.models import QUARTERS, Model
from benchmarks.loading_experiments.session import Loading, Session, best, compare, in_turns
from benchmarks.rounds import Case, Results
from benchmarks.targets import EVEN, Line

NAME = "scaling"
TITLE = "Several processes load one model, cold"
STATE = "llama-1gb"
COUNTS = (1, 2, 4)
WHOLE, BLOCKS = "everything", "a block each"
LIMIT_SUBJECT, OPERATION = "raw file", "load-cold"
MOST_READ = 1.05

OURS = Loading("waystation-safetensors-torch", "read")
OURS_JAX = Loading("waystation-safetensors-jax", "read")
PIPELINE = Loading("fastsafetensors-pipeline", "buffered")
DISTRIBUTED = Loading("runai", "distributed")
WITHOUT_BLOCKS = (PIPELINE, DISTRIBUTED)
PEERS = {
    "fastsafetensors": (
        Loading("fastsafetensors", "buffered"),
        Loading("fastsafetensors", "direct"),
        PIPELINE,
    ),
    "runai": (Loading("runai"), DISTRIBUTED),
    "safetensors, read": (Loading("safetensors-torch", "pread"),),
}
MAPPED = Loading("safetensors-torch", "mmap")
JAX_PEERS = {"safetensors.flax": (Loading("safetensors-jax", "mmap"),)}
LIMIT_WAYS = (
    "threads direct 1 MiB x4",
    "threads buffered 1 MiB x4",
    "threads buffered 8 MiB x4",
    "ring direct 1 MiB x1 depth 16",
    "ring direct 1 MiB x2 depth 8",
)


def case_of(loading: Loading, quarters: int, processes: int, wanted: str) -> Case:
    """How a load is recorded."""
    subject = f"{processes} process{'es' if processes > 1 else ''}"
    if quarters < QUARTERS:
        subject += f", {quarters}/{QUARTERS} of it"
    return Case(NAME, subject, loading.system, wanted)


def plan() -> Iterator[tuple[Loading, str]]:
    """Who loads, and what each process wants."""
    torch = [OURS, *(loading for ways in PEERS.values() for loading in ways), MAPPED]
    yield from ((loading, WHOLE) for loading in torch)
    yield from ((loading, BLOCKS) for loading in torch if loading not in WITHOUT_BLOCKS)
    yield OURS_JAX, BLOCKS
    yield from ((loading, BLOCKS) for ways in JAX_PEERS.values() for loading in ways)


def is_everything(loading: Loading, processes: int) -> bool:
    """Whether a block is all there is, which is measured as that. In JAX it is a sharding all the same."""
    return processes == 1 and LOADERS[loading.loader].framework == "torch"


def points(loading: Loading, wanted: str) -> Iterator[tuple[int, int]]:
    """Quarters and processes."""
    for processes in COUNTS:
        if wanted == BLOCKS and is_everything(loading, processes):
            continue
        if processes == 1 and loading == DISTRIBUTED:
            continue
        yield QUARTERS, processes
        if processes < QUARTERS and wanted == BLOCKS:
            yield processes, processes


def measure(session: Session, repetition: int) -> None:
    """One round; each begins with another loader."""
    limits.measure_loads(session, NAME, LIMIT_SUBJECT, OPERATION, repetition, LIMIT_WAYS)
    for loading, wanted in in_turns(list(plan()), repetition):
        for quarters, processes in points(loading, wanted):
            session.load(
                case_of(loading, quarters, processes, wanted),
                repetition,
                loading,
                Model(STATE, session.quick, quarters),
                processes=processes,
                divided=wanted == BLOCKS,
            )


def count(rounds: int) -> int:
    """How many runs that many rounds make."""
    loads = sum(len(list(points(loading, wanted))) for loading, wanted in plan())
    return rounds * (loads + len(LIMIT_WAYS))


# ---- targets -----------------------------------------------------------------------------------


def evaluate(results: Results) -> Iterator[Line]:
    """No slower than any peer that reads, and no byte read twice from the disk."""
    for processes in COUNTS[1:]:
        for ours, peers, wanted in (
            (OURS, PEERS, WHOLE),
            (OURS, PEERS, BLOCKS),
            (OURS_JAX, JAX_PEERS, BLOCKS),
        ):
            case = case_of(ours, QUARTERS, processes, wanted)
            for name, ways in peers.items():
                text = f"{processes} processes, {wanted}: {ours.loader} no slower than {name}"
                yield compare(text, results.series(case), best(results, case, ways), EVEN)
    for ours, wanted in ((OURS, WHOLE), (OURS, BLOCKS), (OURS_JAX, BLOCKS)):
        yield _read_once(results, case_of(ours, QUARTERS, COUNTS[-1], wanted))


def read_ratio(results: Results, case: Case) -> tuple[float, float] | None:
    """What was read from the disk over what the files hold, median and most; by whoever counts more."""
    size = results.series(case, "state_bytes")
    counted = [results.series(case, name) for name in ("disk_read_bytes", "device_read_bytes")]
    found = [series for series in counted if series is not None]
    if size is None or not found:
        return None
    return (
        max(series.median for series in found) / size.median,
        max(series.worst for series in found) / size.median,
    )


def _read_once(results: Results, case: Case) -> Line:
    text = f"{COUNTS[-1]} processes, {case.operation}, {case.system}: read from the disk, of the files"
    needed, ratio = f"≤ {MOST_READ:g}x", read_ratio(results, case)
    if ratio is None:
        return Line(text, needed, "not measured", "", None)
    return Line(text, needed, f"{ratio[0]:.3f}x", f"{ratio[1]:.3f}x", ratio[1] <= MOST_READ)
