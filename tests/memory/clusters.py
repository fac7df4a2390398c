"""Agents on hosts of their own, which are started, killed, stopped and lost as tests want it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.memory.namespaces import Host, Network, Started, network_of
from tests.memory.proxies import Proxy, between
from tests.support.agents import RUN

from waystation import _native
from waystation.errors import WaystationError
from waystation.memory import agent_program
from waystation.memory.exposition import samples_of

STORE = Path("/dev/shm/agent")  # on every host, in memory of its own
SLOTS = 8
DATA_BYTES = 4 << 20
PORT = 7700  # where agents listen
METRICS_PORT = 9464


class HostAgent:
    """The agent of a host.

    Attributes:
        host: Where it runs.
        ready: What it said when it was ready last.
    """

    def __init__(self, host: Host, log: Path, options: Sequence[str]) -> None:
        self.host = host
        self.ready: dict[str, Any] = {}
        self._log = log
        self._options = [f"--directory={STORE}", f"--run-id={RUN}", f"--slots={SLOTS}", *options]
        self._options += [f"--data-bytes={DATA_BYTES}", "--contents-bytes=64KiB", "--memory-cap-bytes=128MiB"]
        self._started: Started | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._started is not None and self._started.entered.poll() is None

    def start(self) -> None:
        """Starts it, and waits until it serves its host."""
        with self._log.open("ab") as log:
            command = [agent_program(), "run", *self._options]
            self._started = self.host.start(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._started.entered.stdout is not None
        with self._started.entered.stdout as said:
            line = said.readline()
        assert line, f"the agent of {self.host.name} ended:\n{self._log.read_text()}"
        self.ready = json.loads(line)

    def kill(self) -> None:
        """SIGKILL."""
        if self._started is not None:
            self._started.kill()

    def stop(self) -> None:
        """SIGSTOP."""
        assert self._started is not None
        self._started.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._started is not None
        with contextlib.suppress(ProcessLookupError):
            self._started.signal(signal.SIGCONT)

    def client(self) -> _native.AgentClient:
        """Asks it, from outside of its host."""
        return _native.AgentClient(str(self.host.outside(STORE)))

    def number(self, name: str) -> float:
        """One of its metrics; 0 if it does not run or has none of that name."""
        if not self.is_running:
            return 0
        try:
            text = self.client().metrics()
        except WaystationError:
            return 0
        found = [sample.value for sample in samples_of(text) if sample.name == f"waystation_agent_{name}"]
        return sum(found)


class Cluster:
    """Hosts, each with an agent.

    Attributes:
        network: Of the hosts.
        agents: In the order of the hosts.
        proxies: Through which each is reached by the others, if they are.
    """

    def __init__(self, network: Network, directory: Path, copies: int, proxies: Sequence[Proxy]) -> None:
        self.network = network
        self.proxies = proxies
        addresses = [f"{host.address}:{PORT}" for host in network.hosts]
        hosts = directory / "hosts.json"
        listed = [proxy.address for proxy in proxies] or addresses
        named = zip(network.hosts, listed, strict=True)
        hosts.write_text(json.dumps([{"name": host.name, "address": address} for host, address in named]))
        secret = directory / "secret"
        secret.touch(0o600)
        secret.write_text("what only the agents of these tests know")
        together = [f"--hosts={hosts}", f"--secret-file={secret}", f"--copies={copies}", "--dead-after-s=1"]
        self.agents = []
        for host, address in zip(network.hosts, addresses, strict=True):
            of_several = [f"--listen={address}", f"--host={host.name}", *together] if copies > 1 else []
            options = [*of_several, f"--metrics={host.address}:{METRICS_PORT}"]
            self.agents.append(HostAgent(host, directory / f"agent-{host.name}.log", options))

    def start(self) -> None:
        """Starts all agents."""
        for agent in self.agents:
            agent.start()

    def lose_host(self, index: int) -> None:
        """Loses a host, and brings up another in its place with an agent that remembers nothing."""
        self.lose_hosts([index])

    def lose_hosts(self, indices: Sequence[int]) -> None:
        """Loses hosts at once, and brings up others in their places."""
        for index in indices:
            self.agents[index].host.lose()
        for index in indices:
            self.agents[index].host.bring_up()
            self.agents[index].start()

    def controller(self) -> int | None:
        """The host whose agent is the controller that most others follow; None if there is none now."""
        found = [index for index, agent in enumerate(self.agents) if agent.number("is_controller")]
        return found[0] if len(found) == 1 else None


@contextlib.contextmanager
def cluster_of(
    count: int, directory: Path, *, copies: int = 1, through_proxies: bool = False
) -> Iterator[Cluster]:
    """Hosts with agents that are ready; what these say is in the directory.

    Args:
        count: How many.
        directory: Which all of them reach.
        copies: Of each shard. With one, every agent is alone.
        through_proxies: Whether agents reach each other through a proxy before each.
    """
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(network_of(count))
        proxies = []
        if through_proxies:
            for index, host in enumerate(network.hosts):
                target = f"{host.address}:{PORT}"
                proxies.append(stack.enter_context(between(network, target, port=PORT + index, seed=index)))
        cluster = Cluster(network, directory, copies, proxies)
        cluster.start()
        yield cluster
