"""The same in one process, many times over: what a disk may hold after a power cut, and geometries.

One run is a batch. A save is made once, and at each of its calls disks are drawn that a power cut may leave
then; each that no earlier one equals is looked at right there, with nothing started for it. Geometries are
saved and loaded one after another, many arrays at once, from files that are in memory but are read past the
page cache all the same, where the system's way of reading does so.
"""

from __future__ import annotations

import functools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torture import supervisor
from torture.disk import Disk
from torture.faults import geometry
from torture.faults.base import Done, Fault, random_of
from torture.operations import NEW, OLD, OPERATIONS, Operation, Workspace, version_of
from torture.outcomes import Outcome, Verdict
from torture.pieces import Pieces, cut
from torture.processes import attempt, in_child
from torture.states import MixedStateError
from torture.supervisor import Told
from torture.systems import System, Waystation
from waystation.frameworks import dtypes
from waystation.grid import Box, slices_of_box

_DISTINCT = 1 << 30
_BATCH = 2000
_BATCH_BYTES = 1 << 20
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
        looked_at: set[tuple[bytes, frozenset[int | None]]] = set()

        def look(allowed: set[int | None], where: str) -> None:
            nonlocal verdict, at, count
            for how in _WAYS:
                if verdict.outcome is not Outcome.OK:
                    return
                left = disk.image(chance, how)
                count += 1
                # What was looked at before would be found again.
                if (key := (left.digest(), frozenset(allowed))) not in looked_at:
                    left.write(image)
                    looked_at.add(key)
                    verdict, at = _judged(system, image, allowed), f"{where}, {how}, image {count}"

        def observe(told: Told) -> None:
            look({self._before, NEW}, f"{told.name} {' '.join(told.paths)}")
            disk.observe(told)

        done = supervisor.supervise(
            lambda: self._operation.act(system, root), root, observe=observe, timeout_s=_LONGEST_S
        )
        if done.ended.how != "returned":
            return Verdict(Outcome.REFUSED_WRONGLY, done.ended.error), at, count
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
    """Random arrays in random pieces, saved and loaded as other pieces, one set after another."""

    name = "in process/geometry"

    def applies(self, system: System) -> bool:
        return isinstance(system, Waystation)

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return _DISTINCT

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        assert isinstance(system, Waystation)
        path = workspace.in_memory / "checkpoint"
        ended = in_child(lambda: _batch(system, seed, path), _LONGEST_S)
        if ended.how != "returned":
            outcome = Outcome.HUNG if ended.how == "hung" else Outcome.REFUSED_WRONGLY
            return Done(Verdict(outcome, ended.error))
        verdict, at, count = ended.value
        return Done(verdict, at, count)


def _batch(system: Waystation, seed: int, path: Path) -> tuple[Verdict, str, int]:
    chance = random_of(system, Geometries.name, seed)
    pool = np.frombuffer(chance.randbytes(_BATCH_BYTES), np.uint8)
    count = 0
    while count < _BATCH:
        geometric = _drawn(chance, pool)
        saved = {name: pieces.with_values(whole) for name, (whole, pieces, _) in geometric.items()}
        asked = {name: pieces for name, (_, _, pieces) in geometric.items()}
        loading = attempt(functools.partial(_saved_and_loaded, system, path, saved, asked))
        if loading.how != "returned":
            return Verdict(Outcome.REFUSED_WRONGLY, loading.error), _told(geometric), count + 1
        for name, (whole, _, _) in geometric.items():
            count += 1
            if differing := _difference(loading.value[name], whole):
                verdict = Verdict(Outcome.SILENTLY_WRONG, f"'{name}' differs in the piece {differing}")
                return verdict, _told(geometric), count
    return Verdict(Outcome.OK), "", count


_Drawn = dict[str, tuple[npt.NDArray[Any], Pieces, Pieces]]


def _drawn(chance: random.Random, pool: npt.NDArray[np.uint8]) -> _Drawn:
    """Arrays of random bytes, the pieces that are saved of each, and those that are loaded."""
    number = chance.choice([1, 8, 64, 256])
    drawn = {}
    for index in range(number):
        nbytes = len(pool) + 1
        while nbytes > len(pool):  # each dimension has 8 at least
            shape, dtype = geometry.shape_and_dtype(chance, len(pool) // min(number, 64))
            host = dtypes.of_name(dtype).host
            nbytes = math.prod(shape) * host.itemsize
        begin = chance.randrange(len(pool) - nbytes + 1)
        # Neither a value of booleans that is none, nor a NaN that may be made another.
        mask = 1 if dtype == "bool" else 0x3F
        whole = (pool[begin : begin + nbytes] & np.uint8(mask)).view(host).reshape(shape)
        pieces = [Pieces(shape, dtype, cut(chance, shape)) for _ in range(2)]
        drawn[f"array {index}"] = whole, pieces[0], pieces[1]
    return drawn


def _saved_and_loaded(
    system: Waystation, path: Path, saved: dict[str, Pieces], asked: dict[str, Pieces]
) -> dict[str, Pieces]:
    system.save_state(path, saved)
    loaded: dict[str, Pieces] = system.load_state(path, asked)
    return loaded


def _difference(loaded: Pieces, whole: npt.NDArray[Any]) -> Box | None:
    """The first piece that has not the values of the array, bit for bit."""
    assert loaded.values is not None
    for box, values in zip(loaded.boxes, loaded.values, strict=True):
        if values.dtype != whole.dtype or values.tobytes() != whole[slices_of_box(box)].tobytes():
            return box
    return None


def _told(geometric: _Drawn) -> str:
    """What the arrays are, as far as a line has room; a replay has them all."""
    told = (f"{one.dtype}{list(one.shape)} {one.boxes} to {two.boxes}" for _, one, two in geometric.values())
    return "; ".join(told)[:2000]


IN_PROCESS: list[Fault] = [
    Images(OPERATIONS["save"], None),
    Images(OPERATIONS["overwrite"], OLD),
    Geometries(),
]
