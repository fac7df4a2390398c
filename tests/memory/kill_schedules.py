"""Runs in which processes and hosts are killed at random: real agents and trainers on hosts that are lost.

A schedule is what a seed says: which failure comes after how many steps that were kept, or while a program
begins and its agents recover. Where in a save or a recovery it strikes is up to the machine, so the same seed
tries something else each time, and a schedule that has found something is worth being run again and again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.memory import kill_trainers
from tests.memory.clusters import STORE, Cluster
from tests.memory.damages import DAMAGES, slots
from tests.memory.histories import Advanced, Event, HostLost, Kept, NothingLeft, Restored
from tests.memory.kill_trainers import Run
from tests.memory.namespaces import HANG_S
from tests.support.programs import Programs, running

_PORT = 7800  # of the first trainer, on its host
_LONGEST_STOP_S = 0.5
_LONGEST_PAUSE_S = 0.05
_LONGEST_RECOVERY_S = 0.5
_IN_RECOVERY = 0.4  # so often a failure strikes while the program begins


class Schedule:
    """One run with failures.

    Args:
        cluster: The hosts, whose agents run.
        trainers: How many trainers there are, each on one of the first hosts.
        directory: For the checkpoints on disk and what programs say.
        seed: Decides everything.

    Attributes:
        history: What has happened.
        faults: The failures so far, by name and host.
    """

    def __init__(self, cluster: Cluster, trainers: int, directory: Path, seed: int) -> None:
        self.history: list[Event] = []
        self.faults: list[tuple[str, int]] = []
        self._cluster = cluster
        self._trainers = trainers
        self._directory = directory
        self._seed = seed
        self._random = random.Random(seed)
        self._program = -1
        self._kept = 0
        self._lost: list[int] = []  # hosts, since the program was started
        # Those that return have left the program alive.
        self._going_on: dict[str, Callable[[int], None]] = {
            "agent killed": self._kill_agent,
            "agent stopped": self._stop_agent,
            "slots damaged": self._damage_slots,
        }
        if self.host_count > 1:
            self._going_on |= {"controller killed": self._kill_controller, "cable pulled": self._pull_cable}
        self._ending: dict[str, Callable[[Programs, int], None]] = {
            "trainer killed": self._kill_trainer,
            "trainer and agent killed": self._kill_both,
            "host lost": self._lose_host,
        }
        if self.host_count > 2:
            self._ending["two hosts lost"] = self._lose_two

    @property
    def host_count(self) -> int:
        """How many hosts there are."""
        return len(self._cluster.agents)

    def run(self, fault_count: int) -> None:
        """Lets so many failures happen, and has a last program go on after them."""
        left = fault_count
        while left:
            self._lost = []
            with self._programs() as programs:
                left -= self._strike_until_the_end(programs, left)
                for index in range(self._trainers):
                    with contextlib.suppress(ProcessLookupError):
                        programs.signal(index)  # as a launcher does when one has died
                self._drain(programs)
            # Only now: what trainers were told before is to be kept may have come later.
            self.history += [HostLost(victim) for victim in self._lost]
        with self._programs() as programs:
            self._await_progress(programs)

    def _strike_until_the_end(self, programs: Programs, most: int) -> int:
        """Lets at most so many failures happen, until one that ends the program; returns how many did."""
        if self._random.random() < _IN_RECOVERY:
            self._await_opening(programs)
            time.sleep(self._random.uniform(0, _LONGEST_RECOVERY_S))
            name, victim = self._random.choice([*self._ending]), self._random.randrange(self.host_count)
            self.faults.append((f"{name} in recovery", victim))
            self._ending[name](programs, victim)
            return 1
        self._await_progress(programs)
        for struck in range(1, most + 1):
            name, victim = self._choose()
            self.faults.append((name, victim))
            if name in self._ending:
                self._ending[name](programs, victim)
                return struck
            self._going_on[name](victim)
            self._await_progress(programs)
        return most

    def _programs(self) -> contextlib.AbstractContextManager[Programs]:
        self._program += 1
        hosts = [agent.host for agent in self._cluster.agents]
        inits = tuple(host.inside.init for host in hosts)
        # Another port for each, for the one before may not be free yet.
        coordinator = f"{hosts[0].address}:{_PORT + self._program}"
        run = Run(self._directory / "run", self._seed, inits, coordinator)
        return running(
            kill_trainers.train, run, count=self._trainers, framework="jax", directory=self._directory
        )

    def _choose(self) -> tuple[str, int]:
        time.sleep(self._random.uniform(0, _LONGEST_PAUSE_S))
        names = [*self._going_on, *self._ending]
        return self._random.choice(names), self._random.randrange(self.host_count)

    def _await_progress(self, programs: Programs) -> None:
        """Until more steps are kept in memory than ever before, by a number that chance decides."""
        wanted = self._random.randrange(1, 4)
        begun = self._kept
        deadline = time.monotonic() + HANG_S
        while self._kept < begun + wanted:
            for index in range(self._trainers):
                self._note(index, programs.report(index))
            assert time.monotonic() < deadline, f"nothing is kept any more after step {self._kept}"

    def _await_opening(self, programs: Programs) -> None:
        """Until every trainer is about to open its tier, so that agents recover for the program."""
        for index in range(self._trainers):
            assert programs.report(index) == ("opening",)

    def _drain(self, programs: Programs) -> None:
        for index in range(self._trainers):
            for report in programs.reported(index):
                self._note(index, report)

    def _note(self, index: int, report: tuple[object, ...]) -> None:
        match report:
            case ("opening",):
                pass
            case ("nothing left",):
                self.history.append(NothingLeft(self._program, index))
            case ("restored", int(step), str(digest), int(epoch)):
                self.history.append(Restored(self._program, index, step, digest, epoch))
                self._kept = min(self._kept, step)  # what was lost is made again
            case ("advanced", int(step), str(digest)):
                self.history.append(Advanced(self._program, index, step, digest))
            case ("kept", int(in_memory), int(in_directory)):
                self.history.append(Kept(self._program, index, in_memory, in_directory))
                self._kept = max(self._kept, in_memory)
            case _:
                raise AssertionError(f"a trainer reports {report}")

    def _kill_agent(self, victim: int) -> None:
        self._cluster.agents[victim].kill()
        time.sleep(self._random.uniform(0, _LONGEST_PAUSE_S))
        self._cluster.agents[victim].start()

    def _stop_agent(self, victim: int) -> None:
        self._cluster.agents[victim].stop()
        time.sleep(self._random.uniform(0, _LONGEST_STOP_S))
        self._cluster.agents[victim].go_on()

    def _kill_controller(self, otherwise: int) -> None:
        found = self._cluster.controller()
        self._kill_agent(otherwise if found is None else found)

    def _pull_cable(self, victim: int) -> None:
        host = self._cluster.agents[victim].host
        host.unplug()
        time.sleep(self._random.uniform(0, _LONGEST_STOP_S))
        host.plug_in()

    def _damage_slots(self, victim: int) -> None:
        """Damages a part of some slots of a host, headers as often as all the rest."""
        part = self._random.choice([*DAMAGES, "first header", "second header", *["both headers"] * 6])
        found = list(slots(self._cluster.agents[victim].host.outside(STORE)))
        for path in self._random.sample(found, self._random.randint(1, len(found))):
            DAMAGES[part](path)
        self.history.append(HostLost(victim))  # what it had counts for nothing until something newer is kept

    def _kill_trainer(self, programs: Programs, victim: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # that of a host that was lost has ended with it
            programs.signal(victim % self._trainers)

    def _kill_both(self, programs: Programs, victim: int) -> None:
        self._cluster.agents[victim].kill()
        self._kill_trainer(programs, victim)
        self._cluster.agents[victim].start()

    def _lose_host(self, programs: Programs, victim: int) -> None:
        self._lose(programs, [victim])

    def _lose_two(self, programs: Programs, victim: int) -> None:
        """Two hosts at the same moment; whether they had both copies of a shard is up to the seed."""
        other = self._random.choice([index for index in range(self.host_count) if index != victim])
        self._lose(programs, [victim, other])

    def _lose(self, programs: Programs, victims: list[int]) -> None:
        """Loses hosts at once, whatever the others remember."""
        self._lost += victims
        self._cluster.lose_hosts(victims)
        if min(victims) >= self._trainers:
            self._kill_trainer(programs, min(victims))
