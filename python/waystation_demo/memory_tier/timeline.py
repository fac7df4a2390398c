"""Where the time of a recovery went: from the loss of a host until training was where it had been.

The moments come from whoever has seen them: the demo (the loss), the launches on the hosts that were left
(the end of their processes), the program (everything that it did), and for what it did with memory the record
that `waystation.memory.Recovery` is. All of them read the clock of this one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from waystation_demo.memory_tier.runs import HostsRun
from waystation_demo.proof import DemoFailed

# Of these nothing depends on where the state comes from.
SHARED_PHASES = "detect", "process start"
MEANINGS = {
    "detect": "the host is lost, until the programs of all others have noticed and ended",
    "process start": "interpreters, imports, meeting each other",
    "decide": "all agree on one version",
    "transfer": "shards come from other hosts' memory",
    "restore": "from memory, or the disk (not its cache), to tensors",
    "first step": "until the next step is done",
    "train again": "steps that were lost, until training is where it had been",
}


@dataclass(frozen=True)
class Phase:
    """A part of a recovery.

    Attributes:
        name: Which, one of `MEANINGS`.
        begin_s: Seconds after the loss of the host.
        took_s: Seconds.
    """

    name: str
    begin_s: float
    took_s: float


@dataclass(frozen=True)
class AgentRecovery:
    """How the agent of a host took part.

    Attributes:
        host: The number of the host.
        begin_s: Since when it had waited for a decision, in seconds after the loss of the host.
        decide_s: How long it waited.
        transfer_s: How long it then took until all agents had what was decided.
    """

    host: int
    begin_s: float
    decide_s: float
    transfer_s: float


@dataclass(frozen=True)
class Timeline:
    """A recovery.

    Attributes:
        reached_step: How far training had come when the host was lost.
        restored_step: From where it went on.
        phases: In order.
        agents: What agents did meanwhile.
    """

    reached_step: int
    restored_step: int
    phases: list[Phase]
    agents: list[AgentRecovery]

    def took_s(self, name: str) -> float:
        """How long a phase took; 0 if there was none."""
        return sum(phase.took_s for phase in self.phases if phase.name == name)

    def without_shared_s(self) -> float:
        """How long all took that depends on where the state comes from."""
        return sum(phase.took_s for phase in self.phases if phase.name not in SHARED_PHASES)


def timeline_of(run: HostsRun) -> Timeline:
    """The recovery of a run, as its first process went through it.

    Raises:
        DemoFailed: The program has not reported what it has to be made of.
    """
    loss, last = run.loss, len(run.starts[0]) - 1
    opening, restored = run.first("opening", start=last), run.first("restored", start=last)
    steps = {event["step"]: event for event in run.starts[0][last] if event["event"] == "step"}
    if loss is None or opening is None or restored is None or last == 0:
        raise DemoFailed(f"in the run '{run.name}' no process was started again and went on")
    reached_step = max(max(run.losses(start), default=0) for start in range(last))
    first = steps[restored["step"] + 1]["at_s"]
    again = steps[max(reached_step, restored["step"] + 1)]["at_s"]
    ended = max(
        launch["starts"][0]["ended_at_s"] for index, launch in enumerate(run.launches) if index != loss.host
    )
    moments = [("detect", ended), ("process start", opening["at_s"]), *_restoring(run, opening, restored)]
    moments += [("first step", first), ("train again", again)]
    phases, before = [], loss.at_s
    for name, until in moments:
        phases.append(Phase(name, before - loss.at_s, max(0.0, until - before)))
        before = until
    agents = [found for found in _agents(run, loss.at_s) if found.begin_s < first - loss.at_s]
    return Timeline(reached_step, restored["step"], phases, agents)


def _restoring(run: HostsRun, opening: dict[str, Any], restored: dict[str, Any]) -> list[tuple[str, float]]:
    """When the phases end in which the state comes back."""
    recoveries = [found for launch in run.launches for found in launch["recoveries"]]
    if not recoveries:
        return [("restore", restored["at_s"])]
    phases_s = recoveries[-1]["phases_s"]
    decided = opening["at_s"] + phases_s["decide"]
    return [
        ("decide", decided),
        ("transfer", decided + phases_s["transfer"]),
        ("restore", restored["at_s"]),
    ]


def _agents(run: HostsRun, lost_at_s: float) -> list[AgentRecovery]:
    """What agents have said of recoveries that ended after the loss of the host."""
    found = []
    for host, lines in enumerate(run.agent_logs):
        for line in lines:
            pairs = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if pairs.get("event") == "recovered" and float(pairs["time"]) > lost_at_s:
                decide_s, transfer_s = float(pairs["decide_s"]), float(pairs["transfer_s"])
                begin_s = float(pairs["time"]) - lost_at_s - decide_s - transfer_s
                found.append(AgentRecovery(host, begin_s, decide_s, transfer_s))
    return found
