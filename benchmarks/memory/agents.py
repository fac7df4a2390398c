"""Agents that keep versions in memory for a benchmark, and the processor time that they take.

An agent's directory is on tmpfs and gone with the agent, whatever happens to what is measured meanwhile.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waystation.memory import agent_program

TMPFS = Path("/dev/shm")
VERSIONS = 2  # at a time: one that is kept, and the next
ENDING_S = 30.0
_MIB = 1 << 20
_CONTENTS_BYTES = 4 * _MIB
_SPARE_BYTES = 8 * _MIB  # arrays begin at multiples of pages, and a version is more than its arrays


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that is ready.

    Attributes:
        directory: Of its store.
        process: Its process id.
    """

    directory: Path
    process: int

    def cpu_seconds(self) -> float:
        """Processor time that it has taken so far."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """SIGKILL; returns once it has ended."""
        end = os.pidfd_open(self.process)
        try:
            os.kill(self.process, signal.SIGKILL)
            select.select([end], [], [], ENDING_S)
        finally:
            os.close(end)


@contextmanager
def running(
    shard_bytes: int, *, shards: int = 1, run: str | None = None, options: Sequence[str] = ()
) -> Iterator[Agent]:
    """An agent on memory that was touched before.

    Args:
        shard_bytes: How large the arrays of a shard are.
        shards: Of how many shards it keeps versions.
        run: The id of the run; None for one of its own.
        options: Further ones of its command line.
    """
    with tempfile.TemporaryDirectory(dir=TMPFS, prefix="waystation-benchmark-") as parent:
        directory = Path(parent, "agent")
        slots, data_bytes = VERSIONS * shards + 1, shard_bytes + _SPARE_BYTES
        command = [
            os.fspath(agent_program()),
            "run",
            f"--directory={directory}",
            f"--run-id={run or secrets.token_hex(16)}",
            f"--slots={slots}",
            f"--data-bytes={data_bytes}",
            f"--contents-bytes={_CONTENTS_BYTES}",
            f"--versions={VERSIONS - 1}",
            f"--memory-cap-bytes={slots * (data_bytes + 2 * _CONTENTS_BYTES) + _SPARE_BYTES}",
            *options,
        ]
        with _started(command, Path(parent, "log")) as process:
            yield Agent(directory, process)


@contextmanager
def _started(command: Sequence[str], log: Path) -> Iterator[int]:
    with (
        log.open("wb") as stream,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stream) as process,
    ):
        try:
            assert process.stdout is not None, "a pipe was asked for"
            if not process.stdout.readline():
                code = process.wait(ENDING_S)
                raise RuntimeError(f"the agent ended with code {code}: {log.read_text()[-2000:]}")
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()


def checkpointer_of(path: str, directory: str) -> Any:
    """A `Checkpointer` that keeps every step in the memory of an agent, and none in its own directory."""
    from waystation.memory import MemoryTier
    from waystation.training import Checkpointer
    from waystation.training.save_decision_policies import SpecificStepsPolicy

    never = SpecificStepsPolicy(())
    return Checkpointer(path, save_decision_policy=never, memory=MemoryTier(directory=directory))
