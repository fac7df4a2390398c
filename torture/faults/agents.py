"""What befalls the memory tier of hosts whose agents outlive the programs: programs, agents and hosts are
killed between any two calls, and the files of slots are damaged.

A program loads, or saves one step, or so many that slots are used again. The hosts are emulated on this
machine, each with an agent and a store. Programs run on the first. A version is committed there once the save
returns, and survives whatever leaves a copy: the death of all processes, and of the three hosts any one. Of
five, two that are lost at once may have had both copies; then the next program has to be told so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.memory.damages import DAMAGES, slots
from tests.support.agents import Agent, running_agent, running_agents

from torture import states, supervisor
from torture.faults.base import MISSED, Done, Fault, random_of
from torture.operations import (
    OLD,
    OPERATIONS,
    Operation,
    Seen,
    Workspace,
    judge_loaded,
    judged,
    look,
    seen_by,
)
from torture.outcomes import Outcome, Verdict
from torture.processes import Child, Ended, attempt, in_child
from torture.systems import System, WaystationAgent

_SIZES = {"slots": 12, "data_bytes": 2 << 20}
_TOGETHER = ["--dead-after-s=2"]
_TOLD_TO_BE_LOST = "CommittedStepsLost"

# The warning of a step whose copies take longer than a save waits for them, as on a busy machine. The step
# after it has to be kept.
_LATE = "has not got its copies on others"
_LAST, _LATER = 7, 9  # steps: the last that a program saves here, and the one by which it is seen to go on
_saved = mmap.mmap(-1, 1)  # the last step whose save has returned, which the bench sees of its child


def _save_steps(system: System, root: Path) -> None:
    """A program that loads, and then saves one step after another, until slots are written that it has
    written before."""
    assert isinstance(system, WaystationAgent)
    with system.tier(root / "checkpoint") as checkpointer:
        states.step_of(checkpointer.load())
        for step in range(OLD + 1, _LAST + 1):
            system.save_in(checkpointer, step)
            _saved[0] = step


def _save_one(system: System, root: Path) -> None:
    system.save(root / "checkpoint", OLD + 1)
    _saved[0] = OLD + 1


@contextlib.contextmanager
def _machines(root: Path, count: int) -> Iterator[list[Agent]]:
    """The agents of so many hosts, which run."""
    directory = root / "agents"
    directory.mkdir(mode=0o700)
    if count == 1:
        with running_agent(directory / "host-0", **_SIZES) as agent:
            yield [agent]
    else:
        with running_agents(directory, count, _TOGETHER, **_SIZES) as agents:
            yield agents


def _restart(agents: list[Agent]) -> None:
    """Kills agents at once, and starts them again on what they had."""
    for agent in agents:
        agent.kill()
    for agent in agents:
        agent.start()


def _lose(agents: list[Agent]) -> None:
    """Loses hosts at once, with what they had, and brings up others in their places."""
    for agent in agents:
        agent.kill()
        shutil.rmtree(agent.directory)
    for agent in agents:
        agent.start()


class _OnHosts:
    """A fault of hosts.

    Attributes:
        name: As journals and tables call it.
    """

    def __init__(self, name: str, operation: Operation, hosts: set[int]) -> None:
        self.name = f"{name}/{operation.name}"
        self._operation, self._hosts = operation, hosts
        self._addresses: dict[str, list[str]] = {}

    def applies(self, system: System) -> bool:
        return supervisor.SUPPORTED and isinstance(system, WaystationAgent) and system.hosts in self._hosts

    def seeds(self, system: System, workspace: Workspace) -> int:
        return len(self._calls(system, workspace))

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        addresses = self._calls(system, workspace)
        address = addresses[seed % len(addresses)]
        with self._prepared(system, workspace) as (root, agents):
            _saved[0] = OLD
            ended, _ = self._strike(system, root, agents, address, random_of(system, self.name, seed))
            if ended is None:
                return Done(MISSED, address)
            return Done(self._judged(system, root, ended), address)

    def _calls(self, system: System, workspace: Workspace) -> list[str]:
        """What the fault can be done at."""
        if system.name not in self._addresses:
            with self._prepared(system, workspace) as (root, agents):
                _, calls = self._strike(system, root, agents, None, random.Random(0))
            self._addresses[system.name] = supervisor.in_order(calls, "kill")
        return self._addresses[system.name]

    @contextlib.contextmanager
    def _prepared(self, system: System, workspace: Workspace) -> Iterator[tuple[Path, list[Agent]]]:
        assert isinstance(system, WaystationAgent)
        root = workspace.empty(system)
        with _machines(root, system.hosts) as agents:
            prepared = in_child(lambda: self._operation.prepare(system, root))
            if prepared.how != "returned":
                raise RuntimeError(f"'{system.name}' cannot prepare: {prepared.error}")
            yield root, agents

    def _strike(
        self, system: System, root: Path, agents: list[Agent], address: str | None, chance: random.Random
    ) -> tuple[Ended | None, list[supervisor.Call]]:
        """Does it; returns how the operation ended, None where the fault did not come, and the calls."""
        raise NotImplementedError

    def _judged(self, system: System, root: Path, ended: Ended, may_fail: bool = True) -> Verdict:
        return judged(self._operation.name, ended, lambda: self.found(system, root, ended, may_fail))

    def found(self, system: System, root: Path, ended: Ended, may_fail: bool) -> Verdict:
        """What a program finds that goes on from what is there, and one that begins after it.

        A program that only loads would have what it loads doubted: it is taken to have died of that.
        """
        assert isinstance(system, WaystationAgent)
        if self._operation.name == "load":
            verdict, allowed = judge_loaded(ended, {OLD}, may_fail), {OLD}
        else:
            # What was being saved may be whole, too.
            allowed = {_saved[0]} if ended.how == "returned" else {_saved[0], _saved[0] + 1}
            is_wrong = ended.how == "raised" and not may_fail
            verdict = Verdict(Outcome.REFUSED_WRONGLY if is_wrong else Outcome.OK, ended.error)
        if verdict.outcome is not Outcome.OK:
            return verdict
        path = root / "checkpoint"
        with contextlib.ExitStack() as stack:
            begun = attempt(lambda: stack.enter_context(system.tier(path)))
            loaded = begun
            if begun.how == "returned":
                loaded = attempt(lambda: states.step_of(begun.value.load()))
            seen = seen_by(loaded)
            if seen.what != "step" or seen.step not in allowed:
                outcome = Outcome.SILENTLY_WRONG if seen.what == "mixed" else Outcome.LOST
                return Verdict(outcome, f"the {self._operation.name} {ended.how}; then {seen}")
            step = _LATER
            later = attempt(lambda: system.save_in(begun.value, _LATER))
            if _LATE in str(later.error):
                step = _LATER + 1
                later = attempt(lambda: system.save_in(begun.value, _LATER + 1))
            if later.how != "returned":
                return Verdict(Outcome.REFUSED_WRONGLY, f"the next save: {later.error}")
        seen = look(lambda: system.load(path))
        if seen != Seen("step", step):
            return Verdict(Outcome.LOST, f"after the next save: {seen}")
        return Verdict(Outcome.OK)


@dataclass(frozen=True)
class _Blow:
    """What is done to hosts before a call of the program.

    Attributes:
        name: As the names of faults begin.
        hosts: How many there have to be.
        kills_program: Whether the program is killed first; else it stands still meanwhile.
        do: The rest.
    """

    name: str
    hosts: set[int]
    kills_program: bool
    do: Callable[[list[Agent], random.Random], None]


_BLOWS = [
    _Blow("kill program", {1, 3}, True, lambda *_: None),
    _Blow("kill program and agent", {1, 3}, True, lambda agents, _: _restart(agents[:1])),
    _Blow("kill everything", {3}, True, lambda agents, _: _restart(agents)),
    _Blow("kill agent beside", {1, 3}, False, lambda agents, _: _restart(agents[:1])),
    _Blow("kill two agents beside", {3}, False, lambda agents, chance: _restart(chance.sample(agents, 2))),
    _Blow("lose host", {3}, True, lambda agents, _: _lose(agents[:1])),
    _Blow("lose host beside", {3}, False, lambda agents, chance: _lose(chance.sample(agents[1:], 1))),
    _Blow("lose two hosts", {5}, True, lambda agents, chance: _lose([agents[0], chance.choice(agents[1:])])),
]


class Blows(_OnHosts):
    """A blow before each call of the program, on files or connections."""

    def __init__(self, blow: _Blow, operation: Operation) -> None:
        super().__init__(blow.name, operation, blow.hosts)
        self._blow = blow

    def _strike(
        self, system: System, root: Path, agents: list[Agent], address: str | None, chance: random.Random
    ) -> tuple[Ended | None, list[supervisor.Call]]:
        beside = None if self._blow.kills_program else lambda _: self._blow.do(agents, chance)
        done = supervisor.supervise(
            lambda: self._operation.act(system, root), root, address=address, sockets=True, meanwhile=beside
        )
        if done.is_hit and self._blow.kills_program:
            self._blow.do(agents, chance)
        return done.ended if done.is_hit else None, done.calls

    def _judged(self, system: System, root: Path, ended: Ended, may_fail: bool = True) -> Verdict:
        verdict = super()._judged(system, root, ended, may_fail)
        is_told = verdict.outcome is Outcome.LOST and _TOLD_TO_BE_LOST in verdict.detail
        return Verdict(Outcome.OK) if is_told and self._hosts == {5} else verdict


class KilledAgent(_OnHosts):
    """The agent of the program's host is killed before each of its own calls: while it takes over what it
    finds, and while it serves the program. It is started again at once."""

    def __init__(self, operation: Operation) -> None:
        super().__init__("kill agent", operation, {1, 3})

    def _strike(
        self, system: System, root: Path, agents: list[Agent], address: str | None, chance: random.Random
    ) -> tuple[Ended | None, list[supervisor.Call]]:
        del chance
        agents[0].kill()
        reader, writer = os.pipe()

        def agent() -> None:
            os.dup2(writer, 1)
            os.execv(agents[0].command[0], agents[0].command)

        with supervisor.supervised(agent, root, address, sockets=True) as supervised:
            os.close(writer)
            supervised.serve_until(reader)
            started = [] if supervised.is_hit else [Child(lambda: self._operation.act(system, root))]
            for program in started:
                supervised.serve_until(program.handle)
        # Whether it was killed or goes on until now, what it had is there.
        supervised.child.kill()
        supervised.child.end()
        os.close(reader)
        agents[0].start()
        program = started[0] if started else Child(lambda: self._operation.act(system, root))
        ended = program.end()
        return ended if supervised.is_hit else None, supervised.calls


class DamagedSlots(_OnHosts):
    """Damage to any part of the slots of the program's host, of one or all, while no agent runs there."""

    def __init__(self) -> None:
        super().__init__("damage slots", OPERATIONS["load"], {1, 3})

    def seeds(self, system: System, workspace: Workspace) -> int:
        del system, workspace
        return 2 * len(DAMAGES)

    def run(self, system: System, seed: int, workspace: Workspace) -> Done:
        part = list(DAMAGES)[seed % len(DAMAGES)]
        with self._prepared(system, workspace) as (root, agents):
            agents[0].kill()
            found = list(slots(agents[0].directory))
            if seed // len(DAMAGES) % 2:
                found = random_of(system, self.name, seed).sample(found, len(found) // 2)
            for path in found:
                DAMAGES[part](path)
            agents[0].start()
            ended = in_child(lambda: self._operation.act(system, root))
            at = f"{part} of {len(found)} slots"
            if len(agents) == 1 and ended.how == "raised":  # there was no other copy
                return Done(Verdict(Outcome.OK), at)
            return Done(self._judged(system, root, ended, may_fail=False), at)


def _after_one(name: str, act: Callable[[System, Path], int | None]) -> Operation:
    """What a program does that finds one version; hosts are judged by what is found here."""
    return Operation(name, OPERATIONS["overwrite"].prepare, act, OPERATIONS["overwrite"].find)


_OPERATIONS = [
    _after_one("overwrite", _save_one),
    _after_one("steps", _save_steps),
    OPERATIONS["load"],
]
AGENTS: list[Fault] = [
    *(Blows(blow, operation) for blow in _BLOWS for operation in _OPERATIONS),
    *(KilledAgent(operation) for operation in _OPERATIONS),
    DamagedSlots(),
]
