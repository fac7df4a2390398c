"""Saves of a program over several hosts that keep copies for each other, and recoveries of a lost host.

A program of one process on each host saves a state that is cut among them; every shard has two copies. It is
recovered with all hosts there, and with one that was lost and replaced by an empty one. The same program
saves to and loads from the disk in the same rounds, which all hosts share here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial

from benchmarks.distributed import models, programs
from benchmarks.distributed.process import Request as DiskRequest
from benchmarks.distributed.session import Session
from benchmarks.memory import hosts, hosts_process
from benchmarks.memory.checkpoints import RECOVER, SAVE
from benchmarks.memory.hosts import Hosts
from benchmarks.memory.hosts_process import Request
from benchmarks.processes import Outcome
from benchmarks.rounds import Case

NAME = "replication"
HOSTS = 4
COUNTS = (4, 8)  # divide every array, and leave a majority when one is lost
MEMORY, LOST_HOST = "memory of all hosts", "memory of a peer"
PEERS = ("orbax", "orbax-plain")
ON_DISK = (*PEERS, "waystation")
SYSTEMS = (*ON_DISK, MEMORY, LOST_HOST)
_LATEST = ("blocked_s", "opened_s")
_MODULE = "benchmarks.memory.hosts_process"


@dataclass(frozen=True, slots=True)
class Bench:
    """What the turns of a session have in common.

    Attributes:
        model: Of `models.MODELS`.
        count: How many hosts there are.
        hosts: They.
    """

    session: Session
    model: str
    count: int
    hosts: Hosts

    @property
    def subject(self) -> str:
        """Of the cases."""
        return f"{self.count} hosts"


def measure_rounds(session: Session, model: str, count: int, rounds: int) -> None:
    """Measures everything, round after round, beside the same hosts."""
    arrays = models.describe(model, session.quick)
    mesh = (1, count, 1)
    shard_bytes = sum(array.block_bytes(mesh) for array in arrays)
    with hosts.running(count, shard_bytes) as found:
        bench = Bench(session, model, count, found)
        turns = [partial(on_disk, bench, system) for system in ON_DISK]
        turns.append(partial(in_memory, bench))
        for repetition in range(rounds):
            first = repetition % len(turns)
            for turn in (*turns[first:], *turns[:first]):
                turn(repetition)


def count_runs(rounds: int) -> int:
    """How many programs so many rounds run."""
    return rounds * (2 * len(ON_DISK) + 3)


def on_disk(bench: Bench, system: str, repetition: int) -> None:
    """A save to the disk that all share, and a cold recovery from it."""
    with bench.session.checkpoint() as path:
        for operation, name in (("save", SAVE), ("load", RECOVER)):
            request = DiskRequest(
                system=system,
                operation=operation,
                model=bench.model,
                mesh=(1, bench.count, 1),
                devices=bench.count,
                processes=bench.count,
                path=str(path),
                quick=bench.session.quick,
                verify_all=repetition == 0,
            )
            bench.session.run(Case(NAME, bench.subject, system, name), repetition, request)


def in_memory(bench: Bench, repetition: int) -> None:
    """A replicated save; a recovery with all hosts there, and one after the loss of a host."""
    outcome = _run(bench, hosts_process.SAVE, repetition)
    _record(bench, MEMORY, SAVE, repetition, outcome)
    outcome = _run(bench, hosts_process.RECOVER, repetition)
    _record(bench, MEMORY, RECOVER, repetition, outcome)
    # Not that of the process that decides, whose shard has the structure as well.
    bench.hosts.lose(bench.count - 1)
    outcome = _run(bench, hosts_process.RECOVER, repetition)
    _record(bench, LOST_HOST, RECOVER, repetition, outcome)
    shutil.rmtree(bench.session.directory / "on-hosts", ignore_errors=True)


def _run(bench: Bench, operation: str, repetition: int) -> Outcome:
    request = Request(
        system="waystation",
        operation=operation,
        model=bench.model,
        mesh=(1, bench.count, 1),
        devices=bench.count,
        processes=bench.count,
        path=str(bench.session.directory / "on-hosts"),
        quick=bench.session.quick,
        verify_all=repetition == 0,
        agents=bench.hosts.directories,
    )
    directory = bench.session.directory / "program"
    before_s = bench.hosts.cpu_seconds()
    outcome = programs.run(request, directory, bench.session.timeout_s, _MODULE, _LATEST)
    if outcome["status"] == "ok":
        outcome["agent_cpu_s"] = bench.hosts.cpu_seconds() - before_s
    return outcome


def _record(bench: Bench, system: str, operation: str, repetition: int, outcome: Outcome) -> None:
    if outcome["status"] == "ok":
        cpu_s = outcome["cpu_s"] + outcome["agent_cpu_s"]
        outcome["cpu_s_per_gb"] = cpu_s / (outcome["state_bytes"] / 1e9)
    bench.session.record(Case(NAME, bench.subject, system, operation), repetition, outcome)
