"""Several hosts on this machine, each an agent with a directory, an address and a failure domain of its own.

They share the machine's cores, and what they send goes through its loopback: what is measured between them is
what the work costs, not what a network would add. A host is lost as machines are: its agent by SIGKILL, its
directory with it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import agents
from benchmarks.memory.agents import TMPFS, Agent
from waystation._ports import free_port

COPIES = 2


@dataclass(slots=True)
class Hosts:
    """Hosts whose agents know of each other.

    Attributes:
        agents: One for each host, in the order of processes.
    """

    agents: list[Agent]
    _shard_bytes: int
    _directory: Path
    _run: str
    _stacks: list[contextlib.ExitStack]

    @property
    def directories(self) -> list[str]:
        """Those of the agents' stores."""
        return [str(agent.directory) for agent in self.agents]

    def cpu_seconds(self) -> float:
        """Processor time of the agents that run now."""
        return sum(agent.cpu_seconds() for agent in self.agents)

    def lose(self, index: int) -> None:
        """Takes a host away with its memory, and puts an empty one in its place."""
        self.agents[index].kill()
        shutil.rmtree(self.agents[index].directory)
        self._stacks[index].close()
        self.agents[index] = self._start(index)

    def _start(self, index: int) -> Agent:
        stack = self._stacks[index]
        options = [
            f"--listen={_addresses(self._directory)[index]}",
            f"--host={_name(index)}",
            f"--hosts={self._directory / 'hosts.json'}",
            f"--secret-file={self._directory / 'secret'}",
            f"--copies={COPIES}",
        ]
        return stack.enter_context(
            agents.running(self._shard_bytes, shards=COPIES, run=self._run, options=options)
        )


@contextmanager
def running(count: int, shard_bytes: int) -> Iterator[Hosts]:
    """So many hosts, ready, with an agent each."""
    with (
        tempfile.TemporaryDirectory(dir=TMPFS, prefix="waystation-hosts-") as parent,
        contextlib.ExitStack() as everything,
    ):
        directory = Path(parent)
        entries = [
            {"name": _name(index), "address": f"127.0.0.{index + 2}:{free_port()}"} for index in range(count)
        ]
        (directory / "hosts.json").write_text(json.dumps(entries))
        secret = directory / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        stacks = [everything.enter_context(contextlib.ExitStack()) for _ in range(count)]
        hosts = Hosts([], shard_bytes, directory, secrets.token_hex(16), stacks)
        for index in range(count):
            hosts.agents.append(hosts._start(index))
        yield hosts


def _name(index: int) -> str:
    return f"host-{index}"


def _addresses(directory: Path) -> list[str]:
    return [entry["address"] for entry in json.loads((directory / "hosts.json").read_text())]
