"""How a program begins with the memory tier: its processes find out who keeps their versions.

Each asks the agent of its host whether it is alone or one of several; all must say the same. What was begun
and has not succeeded is gone on with when the tier is opened again: agents that recover for a program are not
made to begin anew by the next attempt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from waystation._errors import Conflict
from waystation.coordination import Session
from waystation.memory.agent import PATIENCE_S, OwnAgent, check_room
from waystation.memory.host import OneHostStore
from waystation.memory.hosts import ManyHostsStore, new_program, superseded
from waystation.memory.version_store import VersionStore
from waystation.memory.versions import Whole

# What is told of the store of an agent.
_OF_STATUS = "store", "directory", "slot_bytes", "slot_count", "versions_per_shard"


@dataclass(frozen=True, slots=True)
class _Report:
    """What an agent says of itself, and a process of its sequence."""

    sequence: str
    epoch: int
    host: str
    agent_count: int
    program: int
    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all are to do.

    Attributes:
        sequence: That of the primary.
        epoch: For agents that are alone.
        program: For several; 0 for agents that are alone.
        owners: The hosts of all processes.
    """

    sequence: str
    epoch: int
    program: int
    owners: list[str]


class Beginning:
    """The beginning of one program.

    Args:
        agent: The agent of this host.
        sequence: The sequence of checkpoints. What the primary says counts for all.
    """

    def __init__(self, agent: OwnAgent, sequence: str) -> None:
        self._agent = agent
        self._sequence = sequence
        self._hosts: ManyHostsStore | None = None

    def begin(self, session: Session, *, is_waited_for: bool) -> tuple[VersionStore, list[Whole]]:
        """Begins, together with the other processes.

        Args:
            session: Theirs.
            is_waited_for: Whether the program waits for agents that are not there yet.

        Returns:
            Who keeps versions, and those that can be loaded, the newest first.
        """
        versions_per_shard = 0

        def work() -> bytes:
            nonlocal versions_per_shard
            report = self._report(is_waited_for=is_waited_for)
            versions_per_shard = report.status["versions_per_shard"]
            return json.dumps(asdict(report)).encode()

        plan = _Plan(**json.loads(session.round(work, self._decide)))
        if not plan.program:
            host = OneHostStore(self._agent, plan.sequence, versions_per_shard)
            return host, host.begin(session, plan.epoch)
        if self._hosts is None or self._hosts.program != plan.program:
            versions = versions_per_shard - 1
            self._hosts = ManyHostsStore(self._agent, plan.sequence, plan.owners, plan.program, versions)
        timeout_s = self._agent.deadline_s
        if not is_waited_for:
            timeout_s = min(timeout_s, PATIENCE_S)
        return self._hosts, self._hosts.begin(session, timeout_s)

    def _report(self, *, is_waited_for: bool) -> _Report:
        client = self._agent.client if is_waited_for else self._agent.saver
        status = client.status()
        agent_count = status["agent_count"]
        return _Report(
            self._sequence,
            status["epoch"],
            status["host"],
            agent_count,
            client.standing()["program"] if agent_count > 1 else 0,
            {name: status[name] for name in _OF_STATUS},
        )

    def _decide(self, parts: Sequence[bytes]) -> bytes:
        reports = [_Report(**json.loads(part)) for part in parts]
        counts = sorted({report.agent_count for report in reports})
        if len(counts) > 1:
            raise Conflict(
                "the agents of the processes' hosts do not belong together: they say that there are "
                f"{' and '.join(map(str, counts))}; start all of them with the same --hosts, or none"
            )
        program = 0
        if counts[0] == 1:
            stores = Counter(report.status["store"] for report in reports)
            for report in reports:
                check_room(report.status, stores[report.status["store"]])
        else:
            newest = max(report.program for report in reports)
            program = new_program(newest) if self._hosts is None else self._hosts.program
            if program < newest:
                raise superseded()
        epoch = 1 + max(report.epoch for report in reports)
        owners = [report.host for report in reports]
        return json.dumps(asdict(_Plan(self._sequence, epoch, program, owners))).encode()
