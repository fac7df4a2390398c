"""Damage to files of a version that is not in use: flipped bits, cut ends, appended bytes, holes, missing
files.

A run takes a file and a class of places in it: seeds enumerate both, and draw the place anew each time they
come around. A load may refuse what is damaged, and may succeed where the damage does not matter to it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from torture.faults.base import MISSED, Done, Fault, random_of
from torture.operations import LATER, OLD, OPERATIONS, Workspace, judge_loaded, look
from torture.outcomes import Outcome, Verdict
from torture.processes import attempt, in_child
from torture.systems import System

_BLOCK = 4096
_DRAWN_ANEW = 20

# Where in a file of so many bytes, by the name of the class.
_PLACES: dict[str, Callable[[random.Random, int], int]] = {
    "first": lambda _, size: 0,
    "header": lambda chance, size: chance.randrange(min(size, _BLOCK)),
    "middle": lambda chance, size: chance.randrange(size),
    "last block": lambda chance, size: chance.randrange(max(0, size - _BLOCK), size),
    "last": lambda _, size: size - 1,
}


def _flip(path: Path, chance: random.Random, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def _truncate(path: Path, _: random.Random, place: int) -> None:
    os.truncate(path, place)


def _append(path: Path, chance: random.Random, place: int) -> None:
    del place
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.choice([1, 8, 511, _BLOCK])))


def _zero(path: Path, _: random.Random, place: int) -> None:
    """A block that was never written."""
    with path.open("r+b") as file:
        begin = place // 512 * 512
        file.seek(begin)
        file.write(bytes(min(512, path.stat().st_size - begin)))


def _swap(path: Path, chance: random.Random, place: int) -> None:
    """Two blocks, each at the other's place."""
    size = path.stat().st_size
    blocks = size // 512
    if blocks < 2:
        _flip(path, chance, place)
        return
    one = min(place // 512, blocks - 1)
    other = (one + 1 + chance.randrange(blocks - 1)) % blocks
    with path.open("r+b") as file:
        found = [os.pread(file.fileno(), 512, block * 512) for block in (one, other)]
        for block, content in zip((other, one), found, strict=True):
            os.pwrite(file.fileno(), content, block * 512)


def _remove(path: Path, _: random.Random, place: int) -> None:
    del place
    path.unlink()


_EVERYWHERE = tuple(_PLACES)


class Damage:
    """One kind of damage, at each file and class of places."""

    def __init__(
        self, kind: str, places: tuple[str, ...], do: Callable[[Path, random.Random, int], None]
    ) -> None:
        self.name = f"damage/{kind}"
        self._places, self._do = places, do
        self._operation = OPERATIONS["load"]
        self._files: dict[str, list[str]] = {}

    def applies(self, system: System) -> bool:
        return system.has_files

    def seeds(self, system: System, workspace: Workspace) -> int:
        return len(self._names(system, workspace)) * len(self._places) * _DRAWN_ANEW

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        names = self._names(system, workspace)
        name = names[seed % len(names)]
        place = self._places[seed // len(names) % len(self._places)]
        root = workspace.prepare(system, self._operation)
        path = root / name
        size = path.stat().st_size
        chance = random_of(system, self.name, seed)
        if not size and self.name not in ("damage/append", "damage/remove"):
            return Done(MISSED, name)
        at = _PLACES[place](chance, size) if size else 0
        self._do(path, chance, at)
        return Done(self._judge(system, root), f"{name}, {place}, byte {at} of {size}")

    def _judge(self, system: System, root: Path) -> Verdict:
        judged = in_child(lambda: self._found(system, root))
        if judged.how != "returned":
            outcome = Outcome.HUNG if judged.how == "hung" else Outcome.REFUSED_WRONGLY
            return Verdict(outcome, f"the load, or a save over the damaged version: {judged.error}")
        verdict: Verdict = judged.value
        return verdict

    def _found(self, system: System, root: Path) -> Verdict:
        verdict = judge_loaded(attempt(lambda: self._operation.act(system, root)), {OLD}, may_fail=True)
        if verdict.outcome is not Outcome.OK:
            return verdict
        path = root / "checkpoint"
        later = attempt(lambda: system.save(path, LATER))
        if later.how == "returned" and (seen := look(lambda: system.load(path))).step != LATER:
            outcome = Outcome.SILENTLY_WRONG if seen.what == "mixed" else Outcome.LOST
            return Verdict(outcome, f"after a save over the damaged version: {seen}")
        return verdict

    def _names(self, system: System, workspace: Workspace) -> list[str]:
        # Some names are drawn anew each time a version is saved: files are known by their place in the order.
        if system.name not in self._files:
            root = workspace.prepare(system, self._operation)
            paths = [path for path in root.rglob("*") if path.is_file()]
            self._files[system.name] = sorted(str(path.relative_to(root)) for path in paths)
        return self._files[system.name]


DAMAGE: list[Fault] = [
    Damage("flip", _EVERYWHERE, _flip),
    Damage("truncate", _EVERYWHERE, _truncate),
    Damage("append", ("last",), _append),
    Damage("zeros", _EVERYWHERE, _zero),
    Damage("swap", ("header", "middle", "last block"), _swap),
    Damage("remove", ("first",), _remove),
]
