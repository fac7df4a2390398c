"""Agents of the memory tier as the processes that they are, each with a store in a directory in memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from waystation import _native
from waystation.errors import WaystationError
from waystation.memory import agent_program
from waystation_launch.hosts import HOSTS_FILE, SECRET_FILE, emulated, prepare

RUN = "0123456789abcdef0123456789abcdef"
HANG_S = 60.0  # far beyond what anything here takes


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory on tmpfs that only this user can enter."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="waystation-") as directory:
        yield Path(directory)


def end_agent(store: Path) -> None:
    """Ends whatever agent serves a directory."""
    with suppress(WaystationError):
        process = int(_native.AgentClient(str(store), timeout_s=0.0).status()["process"])
        end = os.pidfd_open(process)
        signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)


class Agent:
    """An agent that can be killed and started again on the same store.

    Attributes:
        directory: Of its store.
        ready: What it said when it was ready last.
    """

    def __init__(
        self,
        directory: Path,
        *,
        slots: int = 4,
        data_bytes: int = 4 << 20,
        run: str = RUN,
        options: Sequence[str] = (),
        metrics: str | None = None,
    ) -> None:
        self.directory = directory
        self.ready: dict[str, Any] = {}
        self._options = [f"--directory={directory}", f"--run-id={run}", f"--slots={slots}"]
        self._options += [f"--data-bytes={data_bytes}", "--contents-bytes=64KiB", "--memory-cap-bytes=1GiB"]
        self._options += options
        self._metrics = metrics
        self._process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def command(self) -> list[str]:
        """By which it is started."""
        command = [str(agent_program()), "run", *self._options]
        if self._metrics is not None:
            # Started again, it serves them where it did.
            command.append(f"--metrics={self.ready.get('metrics') or self._metrics}")
        return command

    def start(self) -> None:
        """Starts it, and waits until it is ready."""
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as said:
            line = said.readline()
        assert line, f"the agent ended with {self._process.wait()}"
        self.ready = json.loads(line)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def end(self) -> int:
        """SIGTERM; returns its exit code."""
        return self._end(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal that does not end it; one that stops it has once this returns."""
        os.kill(self.process, number)
        if number == signal.SIGSTOP:
            wait_until(self._is_stopped)

    def _is_stopped(self) -> bool:
        """Whether none of its threads runs."""
        stats = [path.read_text() for path in Path(f"/proc/{self.process}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def _end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(HANG_S)
        self._process = None
        return code

    def close(self) -> None:
        """Lets nothing of it be left."""
        if self._process is not None:
            self.kill()


@contextmanager
def running_agent(directory: Path, **options: Any) -> Iterator[Agent]:
    """An agent that is ready."""
    agent = Agent(directory, **options)
    agent.start()
    try:
        yield agent
    finally:
        agent.close()


@contextmanager
def running_agents(
    directory: Path, count: int, options: Sequence[str] = (), **others: Any
) -> Iterator[list[Agent]]:
    """Agents of so many hosts, each with a directory and an address of its own, which keep copies for each
    other."""
    hosts = emulated(directory, count)
    prepare(directory, hosts)
    common = [
        f"--hosts={directory / HOSTS_FILE}",
        f"--secret-file={directory / SECRET_FILE}",
    ]
    with ExitStack() as stack:
        agents = []
        for host in hosts:
            own = [f"--listen={host.address}", f"--host={host.name}", *common, *options]
            agents.append(stack.enter_context(running_agent(directory / host.name, options=own, **others)))
        yield agents


def lose(agents: Sequence[Agent], *, are_replaced: bool = True) -> None:
    """Loses hosts at once, and has others in their places, unless their agents are started later."""
    for agent in agents:
        agent.kill()
    for agent in agents:
        shutil.rmtree(agent.directory)
        agent.directory.mkdir(mode=0o700)
        if are_replaced:
            agent.start()


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what will be."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)
