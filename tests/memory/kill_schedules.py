"""Runs in which processes and hosts are killed at random: real agents and trainers on hosts that are lost.

A schedule is what a seed says: which failure comes after how many steps that were kept. Where in a save it
strikes is up to the machine, so the same seed tries something else each time, and a schedule that has found
something is worth being run again and again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.memory import kill_trainers
from tests.memory.clusters import Cluster
from tests.memory.histories import Advanced, Event, HostLost, Kept, Restored
from tests.memory.kill_trainers import Run
from tests.memory.namespaces import HANG_S
from tests.support.programs import Programs, running

_PORT = 7800  # of the first trainer, on its host
_LONGEST_STOP_S = 0.5
_LONGEST_PAUSE_S = 0.05


class Schedule:
    """One run with failures.

    Args:
        cluster: The hosts, whose agents run.
        directory: For the checkpoints on disk and what programs say.
        seed: Decides everything.

    Attributes:
        history: What has happened.
        faults: The failures so far, by name and host.
    """

    def __init__(self, cluster: Cluster, directory: Path, seed: int) -> None:
        self.history: list[Event] = []
        self.faults: list[tuple[str, int]] = []
        self._cluster = cluster
        self._directory = directory
        self._seed = seed
        self._random = random.Random(seed)
        self._program = -1
        self._kept = 0
        # Those that return have left the program alive.
        self._going_on: dict[str, Callable[[int], None]] = {
            "agent killed": self._kill_agent,
            "agent stopped": self._stop_agent,
        }
        if self.host_count > 1:
            self._going_on |= {"controller killed": self._kill_controller, "cable pulled": self._pull_cable}
        self._ending: dict[str, Callable[[Programs, int], None]] = {
            "trainer killed": self._kill_trainer,
            "trainer and agent killed": self._kill_both,
            "host lost": self._lose_host,
        }

    @property
    def host_count(self) -> int:
        """How many hosts there are, each with a trainer."""
        return len(self._cluster.agents)

    def run(self, fault_count: int) -> None:
        """Lets so many failures happen, and has a last program go on after them."""
        left = fault_count
        while left:
            lost: list[int] = []
            with self._programs() as programs:
                self._await_progress(programs)
                while left:
                    left -= 1
                    name, victim = self._choose()
                    self.faults.append((name, victim))
                    if name in self._ending:
                        self._ending[name](programs, victim)
                        if name == "host lost":
                            lost.append(victim)
                        break
                    self._going_on[name](victim)
                    self._await_progress(programs)
                for index in range(self.host_count):
                    with contextlib.suppress(ProcessLookupError):
                        programs.signal(index)  # as a launcher does when one has died
                self._drain(programs)
            # Only now: what trainers were told before is to be kept may have come later.
            self.history += [HostLost(victim) for victim in lost]
        with self._programs() as programs:
            self._await_progress(programs)

    def _programs(self) -> contextlib.AbstractContextManager[Programs]:
        self._program += 1
        hosts = [agent.host for agent in self._cluster.agents]
        inits = tuple(host.inside.init for host in hosts)
        # Another port for each, for the one before may not be free yet.
        coordinator = f"{hosts[0].address}:{_PORT + self._program}"
        run = Run(self._directory / "run", self._seed, inits, coordinator)
        return running(
            kill_trainers.train, run, count=self.host_count, framework="jax", directory=self._directory
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
            for index in range(self.host_count):
                self._note(index, programs.report(index))
            assert time.monotonic() < deadline, f"nothing is kept any more after step {self._kept}"

    def _drain(self, programs: Programs) -> None:
        for index in range(self.host_count):
            for report in programs.reported(index):
                self._note(index, report)

    def _note(self, index: int, report: tuple[object, ...]) -> None:
        match report:
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

    def _kill_trainer(self, programs: Programs, victim: int) -> None:
        programs.signal(victim)

    def _kill_both(self, programs: Programs, victim: int) -> None:
        self._cluster.agents[victim].kill()
        programs.signal(victim)
        self._cluster.agents[victim].start()

    def _lose_host(self, programs: Programs, victim: int) -> None:
        self._cluster.lose_host(victim)
