"""The agents that `waystation top` watches: where their numbers are had, and what of them is shown.

An agent is asked over its socket on this host, or over the address at which it serves numbers for Prometheus.
Both give the same text. What does not answer is a row that says so, and never delays the others.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waystation import _native
from waystation.errors import InvalidInput, Unavailable, WaystationError
from waystation.memory.exposition import samples_of
from waystation_launch.hosts import read_hosts

ANSWER_S = 2.0  # how long an agent may take
_MOST_BYTES = 4 << 20
_PREFIX = "waystation_agent_"
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that is watched.

    Attributes:
        name: By which it is shown.
        text: Gets its numbers.
        counts_this: Whether this process is one of those that it counts.
    """

    name: str
    text: Callable[[], str]
    counts_this: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What was seen of an agent.

    Attributes:
        name: By which it is shown.
        problem: Why there are no numbers; None if there are.
        numbers: By name, without prefix; of those with one label by that label's value.
        about: The labels of its `info`.
    """

    name: str
    problem: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    def number(self, name: str, label: str | None = None) -> int | float | None:
        """One of them, if it is there."""
        found = self.numbers.get(name)
        if label is not None:
            return found.get(label) if isinstance(found, dict) else None
        return found if isinstance(found, int | float) else None


def in_directory(directory: Path) -> Agent:
    """The agent of a store on this host."""
    clients: list[_native.AgentClient] = []

    def text() -> str:
        if not clients:
            clients.append(_native.AgentClient(str(directory), timeout_s=ANSWER_S))
        return clients[0].metrics()

    return Agent(str(directory), text, counts_this=True)


def at_address(address: str, name: str | None = None) -> Agent:
    """An agent that serves its numbers at an address.

    Raises:
        InvalidInput: It is none.
    """
    host, port = split_address(address)
    return Agent(name or address, lambda: _fetch(host, port))


def in_file(path: Path, port: int) -> list[Agent]:
    """The agents of a file of hosts, each of which serves its numbers at this port.

    Raises:
        InvalidInput: The file is not one of hosts.
    """
    return [at_address(_joined(host.machine, port), host.name) for host in read_hosts(path)]


def look(agents: Sequence[Agent]) -> list[View]:
    """Asks all of them at once."""
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(agents)), thread_name_prefix="top") as threads:
        return list(threads.map(_look_at, agents))


def _look_at(agent: Agent) -> View:
    try:
        text = agent.text()
        numbers: dict[str, Any] = {}
        about: dict[str, str] = {}
        for sample in samples_of(text):
            name = sample.name.removeprefix(_PREFIX)
            if name == "info":
                about = sample.labels
            elif not sample.labels:
                numbers[name] = sample.value
            elif len(sample.labels) == 1:
                (label,) = sample.labels.values()
                numbers.setdefault(name, {})[label] = sample.value
    except WaystationError as error:
        return View(agent.name, error.message)
    if agent.counts_this and "processes" in numbers:
        numbers["processes"] -= 1
    return View(about.get("host") or agent.name, None, numbers, about)


def _fetch(host: str, port: int) -> str:
    # Not through a proxy that the environment may name: agents are on the network of the job.
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        content = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(
            f"no agent answers at {_joined(host, port)}: {str(error) or type(error).__name__}"
        ) from None
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise Unavailable(f"what answers at {_joined(host, port)} is no agent: it says {answer.status}")
    return content.decode(errors="replace")


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        InvalidInput: It has not both.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidInput(f"'{address}' is no address; write it like 10.0.0.1:9464")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
