"""Loads over other meshes than that of the save, against loads over the same; all verified.

They are cold; those over other meshes are measured warm as well, where no disk sets the pace. Every library
is measured as it writes by itself, and with subchunks of the same sizes. Libraries are compared by the better
of the two, each by its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from benchmarks.analysis import Ratio, Series
from benchmarks.distributed import limits, models
from benchmarks.distributed.models import TOPOLOGIES, Mesh, Topology
from benchmarks.distributed.process import Request
from benchmarks.distributed.session import Session
from benchmarks.distributed.systems import LIBRARIES, Chunking
from benchmarks.rounds import Case, Results
from benchmarks.targets import Line

NAME = "reshard"
MANNERS = {
    f"{library}{', subchunks' if cut else ''}": (library, cut)
    for library in LIBRARIES
    for cut in (False, True)
}
OURS = "waystation, subchunks"
UNCHANGED = "load, unchanged"
MOST_SLOWER = 1.25
MOST_READ = 1.05
LEAST_FASTER = 5.0
WARM = ", warm"
LIMIT_SUBJECT, LIMIT_OPERATION = "raw file", "read"


def operation_of(target: Mesh) -> str:
    return f"load, {target}"


def measure(session: Session, repetition: int) -> None:
    """One round: every topology with every library, beginning with another library each time."""
    manners = _manners(session)
    shift = repetition % len(manners)
    limits.measure_loads(session, NAME, LIMIT_SUBJECT, LIMIT_OPERATION, repetition)
    for name in session.topologies:
        for manner in manners[shift:] + manners[:shift]:
            _turn(session, repetition, name, TOPOLOGIES[name], manner)


def _turn(session: Session, repetition: int, subject: str, topology: Topology, manner: str) -> None:
    """Saves once, and loads what was saved over every mesh."""
    library, is_cut = MANNERS[manner]
    with session.checkpoint() as path:
        saving = Request(
            system=library,
            operation="save",
            model=topology.model,
            mesh=topology.origin,
            devices=_devices(topology),
            processes=topology.processes,
            path=str(path),
            chunking=_chunking(topology, session.quick) if is_cut else {},
            quick=session.quick,
            verify_all=repetition == 0,
        )
        saved = session.run(Case(NAME, subject, manner, "save"), repetition, saving)
        meshes = {UNCHANGED: topology.origin} | {operation_of(mesh): mesh for mesh in topology.targets}
        warm = {operation + WARM: mesh for operation, mesh in meshes.items() if operation != UNCHANGED}
        for operation, mesh in (meshes | warm).items():
            case = Case(NAME, subject, manner, operation)
            if saved:
                way = "load-warm" if operation in warm else "load"
                session.run(case, repetition, replace(saving, operation=way, mesh=mesh, chunking={}))
            else:
                reason = "nothing was saved that could be loaded"
                session.record(case, repetition, {"status": "failed", "reason": reason})


def count(session: Session, rounds: int) -> int:
    """How many programs that many rounds run."""
    programs = sum(2 + 2 * len(TOPOLOGIES[name].targets) for name in session.topologies)
    return rounds * (len(limits.LOAD_WAYS) + len(_manners(session)) * programs)


def _manners(session: Session) -> list[str]:
    return [manner for manner, (library, _) in MANNERS.items() if library in session.libraries]


def _devices(topology: Topology) -> int:
    data, fsdp, tensor = topology.origin
    return data * fsdp * tensor


def _chunking(topology: Topology, quick: bool) -> dict[str, Chunking]:
    chosen: dict[str, Chunking] = {}
    for array in models.describe(topology.model, quick):
        if topology.chunk_axis in array.spec:
            axis = array.spec.index(topology.chunk_axis)
            chosen[array.leaf.name] = (topology.chunk_bytes(array), axis)
    return chosen


# ---- targets -----------------------------------------------------------------------------------


def evaluate(results: Results) -> Iterator[Line]:
    """How resharded loads compare with unchanged ones, what they read, and how the others do."""
    for subject, topology in TOPOLOGIES.items():
        for target in topology.targets:
            yield from _of_pair(results, subject, operation_of(target))


def _of_pair(results: Results, subject: str, operation: str) -> Iterator[Line]:
    shown = f"{subject}: {operation}"
    own = Case(NAME, subject, OURS, operation)
    ours = results.series(own)
    unchanged = results.series(replace(own, operation=UNCHANGED))
    yield _slower(f"{shown}, {OURS}: times the unchanged load", ours, unchanged)
    yield _read(results, own, f"{shown}, {OURS}: bytes read for each byte needed")
    for library in LIBRARIES[1:]:
        for way in ("", WARM):
            mine, theirs = (
                _best(results, replace(own, operation=operation + way), name)
                for name in (LIBRARIES[0], library)
            )
            text = f"{shown}{way}: faster than {library}, the better of both manners of each"
            yield _faster(text, mine, theirs)


def _best(results: Results, case: Case, library: str) -> Series | None:
    """The better of the two manners of a library."""
    manners = [manner for manner, (of, _) in MANNERS.items() if of == library]
    found = [results.series(replace(case, system=manner)) for manner in manners]
    return min((series for series in found if series), key=lambda series: series.median, default=None)


def _slower(text: str, ours: Series | None, unchanged: Series | None) -> Line:
    needed = f"≤ {MOST_SLOWER:g}x"
    if ours is None or unchanged is None:
        return Line(text, needed, "not measured", "", None)
    ratio = Ratio.of(unchanged, ours)  # how many times faster the unchanged one is
    rounds = ours.values.keys() & unchanged.values.keys()
    worst = max((ours.values[index] / unchanged.values[index] for index in rounds), default=ratio.median)
    return Line(text, needed, f"{ratio.median:.2f}x", f"{worst:.2f}x", ratio.median <= MOST_SLOWER)


def _read(results: Results, case: Case, text: str) -> Line:
    needed = f"≤ {MOST_READ:g}x"
    runs = [run for run in results.runs(**asdict(case)) if run.get("bytes_needed")]
    if not runs:
        return Line(text, needed, "not measured", "", None)
    ratios = sorted(run["bytes_read"] / run["bytes_needed"] for run in runs)
    median = ratios[len(ratios) // 2]
    return Line(text, needed, f"{median:.3f}x", f"{ratios[-1]:.3f}x", ratios[-1] <= MOST_READ)


def _faster(text: str, ours: Series | None, theirs: Series | None) -> Line:
    needed = f"≥ {LEAST_FASTER:g}x"
    if ours is None or theirs is None:
        return Line(text, needed, "not measured", "", None)
    ratio = Ratio.of(ours, theirs)
    return Line(text, needed, f"{ratio.median:.2f}x", f"{ratio.worst:.2f}x", ratio.median >= LEAST_FASTER)
