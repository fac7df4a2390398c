"""Several processes at one version, or one sequence: each is stopped before one of its calls, while others
run.

That is every interleaving of two processes in which one is interrupted once: the n-th seed stops the first
process before its n-th call, lets the other do all it does, and goes on with the first. Where the other
waits for the first (for a lock, say) it is left waiting and the first goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torture import supervisor
from torture.faults.base import MISSED, Done, Fault
from torture.operations import (
    LATER,
    NEW,
    OLD,
    OPERATIONS,
    Operation,
    Workspace,
    judge_loaded,
    seen_by,
    version_of,
)
from torture.outcomes import Outcome, Verdict
from torture.processes import Child, Ended, in_child
from torture.systems import KEPT, System, WaystationRing

_OTHER_IS_THERE = re.compile("conflict|exist|appeared|already|another", re.IGNORECASE)
_WAITS_S = 3.0  # after which the other is taken to wait for the first


@dataclass(frozen=True)
class _Pair:
    """Two things that processes do at once.

    Attributes:
        name: As the names of faults end.
        prepare: What was there before.
        first: What is stopped.
        other: What is done meanwhile.
        judge: What came of both.
    """

    name: str
    prepare: Operation
    first: Callable[[System, Path], int | None]
    other: Callable[[System, Path], int | None]
    judge: Callable[[System, Path, Ended, Ended], Verdict]


class Together:
    """One of the pairs, with the first stopped before each of its calls."""

    def __init__(self, pair: _Pair) -> None:
        self.name = f"together/{pair.name}"
        self._pair = pair
        self._addresses: dict[str, list[str]] = {}

    def applies(self, system: System) -> bool:
        needs_collection = self._pair.prepare.name == "collection"
        return supervisor.SUPPORTED and system.has_files and (system.has_collection or not needs_collection)

    def seeds(self, system: System, workspace: Workspace) -> int:
        return len(self._calls(system, workspace))

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        addresses = self._calls(system, workspace)
        address = addresses[seed % len(addresses)]
        root = workspace.prepare(system, self._pair.prepare)
        others: list[Child] = []

        def meanwhile(_: Callable[[int], None]) -> None:
            others.append(Child(lambda: self._pair.other(system, root)))
            others[0].has_ended(_WAITS_S)

        first = supervisor.supervise(
            lambda: self._pair.first(system, root),
            root,
            address=address,
            ring=isinstance(system, WaystationRing),
            meanwhile=meanwhile,
        )
        if not others:
            return Done(MISSED, address)
        other = others[0].end()
        if "hung" in (first.ended.how, other.how):
            return Done(Verdict(Outcome.HUNG, f"{first.ended.how} beside {other.how}"), address)
        return Done(self._pair.judge(system, root, first.ended, other), address)

    def _calls(self, system: System, workspace: Workspace) -> list[str]:
        if system.name not in self._addresses:
            root = workspace.prepare(system, self._pair.prepare)
            ring = isinstance(system, WaystationRing)
            done = supervisor.supervise(lambda: self._pair.first(system, root), root, ring=ring)
            self._addresses[system.name] = supervisor.in_order(done.calls, "kill")
        return self._addresses[system.name]


def _judge_writers(system: System, root: Path, first: Ended, other: Ended) -> Verdict:
    """At least one of the two has saved, and what is there is of one that has said so; a writer may fail only
    because the other is there."""
    said = {step for ended, step in ((first, NEW), (other, LATER)) if ended.how == "returned"}
    how = f"one {_told(first)}, the other {_told(other)}"
    loaded = in_child(lambda: version_of(system, root))
    if loaded.how == "hung":
        return Verdict(Outcome.HUNG, how)
    seen = seen_by(loaded)
    if seen.what == "mixed":
        return Verdict(Outcome.SILENTLY_WRONG, f"{how}; {seen.detail}")
    if not said:
        return Verdict(Outcome.REFUSED_WRONGLY, f"{how}; then {seen.what} {seen.step}")
    if seen.what != "step" or seen.step not in said:
        return Verdict(Outcome.LOST, f"{how}; then {seen.what} {seen.step} {seen.detail}")
    failed = [ended for ended in (first, other) if ended.how != "returned"]
    if failed and not _OTHER_IS_THERE.search(failed[0].error):
        return Verdict(Outcome.REFUSED_WRONGLY, how)
    return Verdict(Outcome.OK)


def _judge_reader(steps: set[int]) -> Callable[[System, Path, Ended, Ended], Verdict]:
    """The reader gets one of the steps, whole; the writer is not disturbed by it."""

    def judge(system: System, root: Path, reader: Ended, writer: Ended) -> Verdict:
        del system, root
        verdict = judge_loaded(reader, steps, may_fail=False)
        if verdict.outcome is Outcome.OK and writer.how != "returned":
            return Verdict(Outcome.REFUSED_WRONGLY, f"the writer: {writer.error}")
        return verdict

    return judge


def _told(ended: Ended) -> str:
    return "returned" if ended.how == "returned" else ended.error


def _overwrite_twice(system: System, root: Path) -> None:
    for step in (NEW, LATER):
        system.save(root / "checkpoint", step)


def _go_on(system: System, root: Path) -> None:
    """Saves steps until those that the reader has found at first are removed."""
    for step in range(KEPT + 1, 2 * KEPT + 2):
        system.keep(root / "run", step)


_PAIRS = [
    _Pair(
        "two writers",
        OPERATIONS["overwrite"],
        lambda system, root: system.save(root / "checkpoint", NEW),
        lambda system, root: system.save(root / "checkpoint", LATER),
        _judge_writers,
    ),
    _Pair(
        "two first writers",
        OPERATIONS["save"],
        lambda system, root: system.save(root / "checkpoint", NEW),
        lambda system, root: system.save(root / "checkpoint", LATER),
        _judge_writers,
    ),
    _Pair(
        "reader beside writer",
        OPERATIONS["load"],
        lambda system, root: system.load(root / "checkpoint"),
        lambda system, root: system.save(root / "checkpoint", NEW),
        _judge_reader({OLD, NEW}),
    ),
    _Pair(
        "reader beside two writes",
        OPERATIONS["load"],
        lambda system, root: system.load(root / "checkpoint"),
        _overwrite_twice,
        _judge_reader({OLD, NEW, LATER}),
    ),
    _Pair(
        "writer beside reader",
        OPERATIONS["overwrite"],
        lambda system, root: system.save(root / "checkpoint", NEW),
        lambda system, root: system.load(root / "checkpoint"),
        lambda system, root, writer, reader: _judge_reader({OLD, NEW})(system, root, reader, writer),
    ),
    _Pair(
        "reader beside collector",
        OPERATIONS["collection"],
        lambda system, root: system.load_newest(root / "run"),
        _go_on,
        _judge_reader(set(range(KEPT, 2 * KEPT + 2))),
    ),
    _Pair(
        "collector beside reader",
        OPERATIONS["collection"],
        lambda system, root: system.keep(root / "run", KEPT + 1),
        lambda system, root: system.load_newest(root / "run"),
        lambda system, root, writer, reader: _judge_reader({KEPT, KEPT + 1})(system, root, reader, writer),
    ),
]


class Fork:
    """The process forks before each call of a save or load; the child loads, and so does the parent later."""

    def __init__(self, operation: Operation) -> None:
        self.name = f"fork/{operation.name}"
        self._operation = operation
        self._addresses: dict[str, list[str]] = {}

    def applies(self, system: System) -> bool:
        return supervisor.SUPPORTED and system.ours and system.has_files

    def seeds(self, system: System, workspace: Workspace) -> int:
        return len(self._calls(system, workspace))

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        addresses = self._calls(system, workspace)
        address = addresses[seed % len(addresses)]
        root = workspace.prepare(system, self._operation)
        told, tell = os.pipe()  # to the process: now
        forked, say = os.pipe()  # from the process: done

        def meanwhile(serve_until: Callable[[int], None]) -> None:
            os.write(tell, b"0")
            serve_until(forked)

        done = supervisor.supervise(
            lambda: _act_and_fork(lambda: self._operation.act(system, root), root, system, told, say),
            root,
            address=address,
            ring=isinstance(system, WaystationRing),
            meanwhile=meanwhile,
        )
        for descriptor in (told, tell, forked, say):
            os.close(descriptor)
        if not done.is_hit:
            return Done(MISSED, address)
        if done.ended.how != "returned":
            return Done(self._operation.judge(system, root, done.ended, False), address)
        value, child = done.ended.value
        if child != "ok":
            outcome = Outcome.HUNG if child == "hung" else Outcome.REFUSED_WRONGLY
            return Done(Verdict(outcome, f"the forked child: {child}"), address)
        return Done(self._operation.judge(system, root, Ended("returned", value), False), address)

    def _calls(self, system: System, workspace: Workspace) -> list[str]:
        if system.name not in self._addresses:
            root = workspace.prepare(system, self._operation)
            ring = isinstance(system, WaystationRing)
            done = supervisor.supervise(lambda: self._operation.act(system, root), root, ring=ring)
            self._addresses[system.name] = supervisor.in_order(done.calls, "kill")
        return self._addresses[system.name]


def _act_and_fork(
    act: Callable[[], int | None], root: Path, system: System, told: int, say: int
) -> tuple[int | None, str]:
    """Acts in a thread, and forks when told to; returns what the act and the child came to."""
    came: list[int | None] = []
    failed: list[BaseException] = []

    def acting() -> None:
        try:
            came.append(act())
        except BaseException as error:
            failed.append(error)
        finally:
            with contextlib.suppress(OSError):
                os.write(say_end, b"0")

    end, say_end = os.pipe()
    thread = threading.Thread(target=acting)
    thread.start()
    child = _fork_when_told(told, end, root, system)
    os.write(say, b"0")
    thread.join()
    if failed:
        raise failed[0]
    return came[0], child


def _fork_when_told(told: int, end: int, root: Path, system: System) -> str:
    ready, _, _ = select.select([told, end], [], [])
    if told not in ready:
        return "ok"
    ended = in_child(lambda: _load_elsewhere(root, system), timeout_s=20)
    if ended.how == "returned":
        return "ok" if ended.value == LATER else f"loaded {ended.value}"
    return ended.error


def _load_elsewhere(root: Path, system: System) -> int:
    """What a forked child does: a save and a load of its own, at a place of its own."""
    own = root / "of-the-child"
    own.mkdir()
    system.save(own / "checkpoint", LATER)
    return system.load(own / "checkpoint")


TOGETHER: list[Fault] = [
    *(Together(pair) for pair in _PAIRS),
    *(Fork(OPERATIONS[name]) for name in ("overwrite", "load")),
]
