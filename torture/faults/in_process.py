"""The same in one process, many times over: what a disk may hold after a power cut, and geometries.

One run is a batch. A save is made once, and at each of its calls disks are drawn that a power cut may leave
then; each is looked at right there, with nothing started for it. Geometries are saved and loaded one after
another, from files that are in memory but are read past the page cache all the same, where the system's way
of reading does so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torture import supervisor
from torture.disk import Disk
from torture.faults import geometry
from torture.faults.base import Done, Fault, random_of
from torture.operations import NEW, OLD, OPERATIONS, Operation, Workspace, version_of
from torture.outcomes import Outcome, Verdict
from torture.processes import in_child
from torture.states import MixedStateError
from torture.supervisor import Told
from torture.systems import System, Waystation

_DISTINCT = 1 << 30
_BATCH = 200
_BATCH_BYTES = 256 << 10
_LONGEST_S = 600.0
_WAYS = ("nothing", "entries", "some", "some", "some")


class Images:
    """Disks that a power cut may leave, drawn at each call of one save."""

    def __init__(self, operation: Operation, before: int | None) -> None:
        self.name = f"in process/power cut/{operation.name}"
        self._operation, self._before = operation, before

    def applies(self, system: System) -> bool:
        return supervisor.SUPPORTED and system.ours and system.has_files and system.moves_by_calls

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return _DISTINCT

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        root = workspace.prepare(system, self._operation)
        image = workspace.in_memory / "image"
        image.mkdir(exist_ok=True)
        ended = in_child(lambda: self._looked_at(system, seed, root, image), _LONGEST_S)
        if ended.how != "returned":
            outcome = Outcome.HUNG if ended.how == "hung" else Outcome.REFUSED_WRONGLY
            return Done(Verdict(outcome, ended.error))
        verdict, at, count = ended.value
        return Done(verdict, at, count)

    def _looked_at(self, system: System, seed: int, root: Path, image: Path) -> tuple[Verdict, str, int]:
        chance = random_of(system, self.name, seed)
        disk = Disk(root)
        verdict, at, count = Verdict(Outcome.OK), "", 0

        def look(allowed: set[int | None], where: str) -> None:
            nonlocal verdict, at, count
            if verdict.outcome is not Outcome.OK:
                return
            how = chance.choice(_WAYS)
            disk.leave(image, chance, how)
            count += 1
            verdict, at = _judged(system, image, allowed), f"{where}, {how}, image {count}"

        def observe(told: Told) -> None:
            look({self._before, NEW}, f"{told.name} {' '.join(told.paths)}")
            disk.observe(told)

        done = supervisor.supervise(
            lambda: self._operation.act(system, root), root, observe=observe, timeout_s=_LONGEST_S
        )
        if done.ended.how != "returned":
            return Verdict(Outcome.REFUSED_WRONGLY, done.ended.error), at, count
        for _ in range(len(_WAYS)):
            look({NEW}, "the end")
        return verdict, at if verdict.outcome is not Outcome.OK else "", count


def _judged(system: System, image: Path, allowed: set[int | None]) -> Verdict:
    try:
        found = version_of(system, image)
    except MixedStateError as error:
        return Verdict(Outcome.SILENTLY_WRONG, str(error))
    except Exception as error:
        outcome = Outcome.TORN if None in allowed else Outcome.LOST
        return Verdict(outcome, f"{type(error).__name__}: {error}"[:400])
    if found in allowed:
        return Verdict(Outcome.OK)
    return Verdict(Outcome.LOST, f"found {found}, which is not among {allowed}")


class Geometries:
    """Random arrays and shardings, in one process after another of them."""

    name = "in process/geometry"

    def applies(self, system: System) -> bool:
        return isinstance(system, Waystation)

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return _DISTINCT

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        assert isinstance(system, Waystation)
        ended = in_child(lambda: _batch(system, seed, workspace.in_memory), _LONGEST_S)
        if ended.how != "returned":
            outcome = Outcome.HUNG if ended.how == "hung" else Outcome.REFUSED_WRONGLY
            return Done(Verdict(outcome, ended.error))
        verdict, at, count = ended.value
        return Done(verdict, at, count)


def _batch(system: Waystation, seed: int, root: Path) -> tuple[Verdict, str, int]:
    import jax

    jax.config.update("jax_num_cpu_devices", geometry.DEVICES)
    jax.config.update("jax_enable_x64", True)
    for index in range(_BATCH):
        own = seed * _BATCH + index
        arrays = geometry.drawn(random_of(system, Geometries.name, own), _BATCH_BYTES)
        steps: list[Callable[[Waystation, Path, dict[str, geometry.Geometric], int], None]]
        steps = [geometry.save, geometry.load]
        for step in steps:
            try:
                step(system, root / "checkpoint", arrays, own)
            except MixedStateError as error:
                return Verdict(Outcome.SILENTLY_WRONG, str(error)), geometry.told(arrays), index + 1
            except Exception as error:
                detail = f"{step.__name__}: {type(error).__name__}: {error}"[:400]
                return Verdict(Outcome.REFUSED_WRONGLY, detail), geometry.told(arrays), index + 1
    return Verdict(Outcome.OK), "", _BATCH


IN_PROCESS: list[Fault] = [
    Images(OPERATIONS["save"], None),
    Images(OPERATIONS["overwrite"], OLD),
    Geometries(),
]
