"""What a process does while a fault is done to it, and the law by which what is there afterwards is
judged."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torture.outcomes import Outcome, Verdict
from torture.processes import Ended, attempt, in_child
from torture.systems import KEPT, System

OLD, NEW, LATER = 1, 2, 5


@dataclass(frozen=True)
class Operation:
    """What a process does.

    Attributes:
        name: As the names of faults end.
        prepare: Makes what was there before, undisturbed.
        act: What the fault is done to.
        find: Says what came of it, from how the act ended and whether that is allowed to fail.
    """

    name: str
    prepare: Callable[[System, Path], None]
    act: Callable[[System, Path], int | None]
    find: Callable[[System, Path, Ended, bool], Verdict]

    def judge(self, system: System, root: Path, ended: Ended, may_fail: bool) -> Verdict:
        """Says from a clean process what came of it: a program that starts again does all of it, too."""
        return judged(self.name, ended, lambda: self.find(system, root, ended, may_fail))


def judged(name: str, ended: Ended, find: Callable[[], Verdict]) -> Verdict:
    """What `find` finds, in a process of its own, after an operation of that name has ended."""
    if ended.how == "hung":
        return Verdict(Outcome.HUNG, f"the {name}")
    found = in_child(find)
    if found.how != "returned":
        outcome = Outcome.HUNG if found.how == "hung" else Outcome.REFUSED_WRONGLY
        return Verdict(outcome, f"a program that starts again after the {name}: {found.error}")
    verdict: Verdict = found.value
    return verdict


@dataclass(frozen=True)
class Seen:
    """What a process finds at a path: `absent`, `step`, `mixed` or `refused`."""

    what: str
    step: int = -1
    detail: str = ""


def look(load: Callable[[], int | None]) -> Seen:
    """Loads; the function returns None where nothing is there."""
    return seen_by(attempt(load))


def seen_by(ended: Ended) -> Seen:
    """What a load has seen that has not hung."""
    if ended.how == "returned":
        return Seen("absent") if ended.value is None else Seen("step", ended.value)
    return Seen("mixed" if ended.error_type == "MixedStateError" else "refused", detail=ended.error)


def _at(root: Path) -> Path:
    return root / "checkpoint"


def version_of(system: System, root: Path) -> int | None:
    """The step at the one path that versions are saved at; None where no version is there."""
    return system.load(_at(root)) if system.is_there(_at(root)) else None


def _judge_version(system: System, root: Path, ended: Ended, may_fail: bool, before: int | None) -> Verdict:
    """Judges one version at one path, which a save of `NEW` was to replace."""
    seen = look(lambda: version_of(system, root))
    if seen.what == "mixed":
        return Verdict(Outcome.SILENTLY_WRONG, f"the load: {seen.detail}")
    returned = ended.how == "returned"
    allowed = {NEW} if returned else {NEW, before}
    found = {"absent": None, "step": seen.step}.get(seen.what, -1)
    if found not in allowed:
        was = (
            f"the save {'returned' if returned else ended.error}; then {seen.what} {seen.step} {seen.detail}"
        )
        is_lost = returned or before is not None
        return Verdict(Outcome.LOST if is_lost else Outcome.TORN, was)
    if ended.how == "raised" and not may_fail:
        return Verdict(Outcome.REFUSED_WRONGLY, f"the save: {ended.error}")
    return _judge_later(system, root)


def _judge_later(system: System, root: Path) -> Verdict:
    """Whether the program can go on: it saves a later version, and loads it."""
    ended = attempt(lambda: system.save(_at(root), LATER))
    if ended.how != "returned":
        return Verdict(Outcome.REFUSED_WRONGLY, f"the next save: {ended.error}")
    seen = look(lambda: version_of(system, root))
    if seen != Seen("step", LATER):
        outcome = Outcome.SILENTLY_WRONG if seen.what == "mixed" else Outcome.LOST
        return Verdict(outcome, f"after the next save: {seen}")
    return Verdict(Outcome.OK)


def _judge_load(system: System, root: Path, ended: Ended, may_fail: bool) -> Verdict:
    verdict = judge_loaded(ended, {OLD}, may_fail)
    if verdict.outcome is not Outcome.OK:
        return verdict
    seen = look(lambda: version_of(system, root))
    if seen != Seen("step", OLD):
        outcome = Outcome.SILENTLY_WRONG if seen.what == "mixed" else Outcome.LOST
        return Verdict(outcome, f"after the load: {seen}")
    return verdict


def judge_loaded(ended: Ended, allowed: set[int], may_fail: bool) -> Verdict:
    """Judges what one load came to."""
    if ended.how == "hung":
        return Verdict(Outcome.HUNG, "the load")
    if ended.how == "returned" and ended.value not in allowed:
        return Verdict(Outcome.SILENTLY_WRONG, f"the load gave step {ended.value}")
    if ended.error_type == "MixedStateError":
        return Verdict(Outcome.SILENTLY_WRONG, f"the load: {ended.error}")
    if ended.how == "raised" and not may_fail:
        return Verdict(Outcome.REFUSED_WRONGLY, f"the load: {ended.error}")
    return Verdict(Outcome.OK)


def _run(root: Path) -> Path:
    return root / "run"


def _keep_old(system: System, root: Path) -> None:
    for step in range(1, KEPT + 1):
        system.keep(_run(root), step)


def _judge_steps(system: System, root: Path, ended: Ended, may_fail: bool) -> Verdict:
    """Judges a sequence: steps 1 and 2 were there, 3 was to be saved, and 1 removed."""
    listed = attempt(lambda: system.kept(_run(root)))
    if listed.how != "returned":
        return Verdict(Outcome.LOST, f"the sequence cannot be opened: {listed.error}")
    newest = KEPT + 1
    needed = {KEPT, newest} if ended.how == "returned" else {KEPT}
    if missing := needed - set(listed.value):
        was = "returned" if ended.how == "returned" else ended.error
        return Verdict(Outcome.LOST, f"the save {was}; steps {sorted(missing)} are missing")
    for step in listed.value:
        verdict = _judge_step(system, root, step, is_committed=step in needed or step < newest)
        if verdict.outcome is not Outcome.OK:
            return verdict
    if ended.how == "raised" and not may_fail:
        return Verdict(Outcome.REFUSED_WRONGLY, f"the save: {ended.error}")
    later = attempt(lambda: system.keep(_run(root), LATER))
    if later.how != "returned":
        return Verdict(Outcome.REFUSED_WRONGLY, f"the next save: {later.error}")
    return _judge_step(system, root, LATER, is_committed=True)


def _judge_step(system: System, root: Path, step: int, *, is_committed: bool) -> Verdict:
    seen = look(lambda: system.load_kept(_run(root), step))
    if seen.what == "step" and seen.step == step:
        return Verdict(Outcome.OK)
    detail = f"step {step}, which is listed: {seen.what} {seen.step} {seen.detail}"
    if seen.what in ("mixed", "step"):
        return Verdict(Outcome.SILENTLY_WRONG, detail)
    # What is being removed may be found damaged, as long as it says so: nobody was to need it any more.
    if step < KEPT:
        return Verdict(Outcome.TORN, detail)
    return Verdict(Outcome.LOST if is_committed else Outcome.TORN, detail)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "save",
            lambda _, root: root.mkdir(exist_ok=True),
            lambda system, root: system.save(_at(root), NEW),
            lambda system, root, ended, may_fail: _judge_version(system, root, ended, may_fail, None),
        ),
        Operation(
            "overwrite",
            lambda system, root: system.save(_at(root), OLD),
            lambda system, root: system.save(_at(root), NEW),
            lambda system, root, ended, may_fail: _judge_version(system, root, ended, may_fail, OLD),
        ),
        Operation(
            "collection",
            _keep_old,
            lambda system, root: system.keep(_run(root), KEPT + 1),
            _judge_steps,
        ),
        Operation(
            "load",
            lambda system, root: system.save(_at(root), OLD),
            lambda system, root: system.load(_at(root)),
            _judge_load,
        ),
    )
}


class Workspace:
    """A directory in which runs are made, one after another, with what operations find prepared once.

    Systems that keep states in memory have one on a file system in memory.

    Attributes:
        in_memory: A directory on that file system.
    """

    def __init__(self, base: Path, in_memory: Path) -> None:
        self._bases = {True: base, False: in_memory}
        self._base = base
        self.in_memory = in_memory

    @property
    def root(self) -> Path:
        """Where the run is made."""
        return self._base / "root"

    def prepare(self, system: System, operation: Operation) -> Path:
        """The directory of a run, with what is there before the operation.

        Raises:
            RuntimeError: What is there before could not be made, though nothing disturbed it.
        """
        self.clear()
        self._base = self._bases[system.has_files]
        source = self._base / "prepared" / f"{system.name}-{operation.name}"
        if not source.exists():
            self.root.mkdir(parents=True)
            ended = in_child(lambda: operation.prepare(system, self.root))
            if ended.how != "returned":
                raise RuntimeError(f"'{system.name}' cannot prepare for '{operation.name}': {ended.error}")
            source.parent.mkdir(parents=True, exist_ok=True)
            # Checkpoints are made where they will be: some may know their place.
            shutil.copytree(self.root, source, symlinks=True, ignore=_sockets)
            return self.root
        shutil.copytree(source, self.root, symlinks=True)
        return self.root

    def empty(self, system: System) -> Path:
        """The directory of a run, with nothing in it."""
        self.clear()
        self._base = self._bases[system.has_files]
        self.root.mkdir(parents=True)
        return self.root

    def end_agents(self) -> None:
        """Kills agents that have outlived the processes that had started them."""
        if self._base == self._bases[False]:
            for directory in Path("/proc").iterdir():
                if directory.name.isdigit():
                    self._end_agent(int(directory.name))

    def _end_agent(self, process: int) -> None:
        own = b"--directory=" + os.fsencode(self.root) + b"/"
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            handle = os.pidfd_open(process)
            try:
                if own in Path(f"/proc/{process}/cmdline").read_bytes():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    select.select([handle], [], [])
            finally:
                os.close(handle)

    def clear(self) -> None:
        """Ends and removes what a run has left."""
        self.end_agents()
        shutil.rmtree(self.root, ignore_errors=True)


def _sockets(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(directory) / name).is_socket()]
