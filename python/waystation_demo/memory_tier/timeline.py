"""Where the time of a recovery went: from the loss of a host until training was where it had been.

The moments come from whoever has seen them: the demo (the loss), the launches on the hosts that were left
(the end of their processes), the program (everything that it did), and for what it did with memory the record
that `waystation.memory.Recovery` is. All of them read the clock of this one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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


# ---- the picture -------------------------------------------------------------------------------
# The picture of the demo: both recoveries from the loss of the host on, and what agents did meanwhile.


COLORS = {
    "detect": "0.55",
    "process start": "0.85",
    "decide": "tab:purple",
    "transfer": "tab:orange",
    "restore": "tab:green",
    "first step": "tab:blue",
    "train again": "crimson",
}


def draw_timelines(path: Path, timelines: dict[str, Timeline], lost_host: int) -> None:
    """Writes the picture as a PNG."""
    # The object interface needs no display and leaves pyplot's global state alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    whole, parts = figure.subplots(2, 1, height_ratios=[1.5, 1])
    _draw_whole(whole, timelines, lost_host)
    _draw_parts(parts, timelines)
    figure.savefig(path, dpi=150)


def _draw_whole(axes: Any, timelines: dict[str, Timeline], lost_host: int) -> None:
    rows = [f"back from {name}" for name in timelines]
    for row, timeline in enumerate(timelines.values()):
        for phase in timeline.phases:
            axes.barh(row, phase.took_s, left=phase.begin_s, color=COLORS[phase.name], height=0.6)
    agents = [agent for timeline in timelines.values() for agent in timeline.agents]
    for host in sorted({agent.host for agent in agents}):
        row = len(rows)
        rows.append(f"agent of host-{host}" + (" (new)" if host == lost_host else ""))
        for agent in (agent for agent in agents if agent.host == host):
            decided_s = agent.begin_s + agent.decide_s
            axes.barh(row, agent.decide_s, left=agent.begin_s, color=COLORS["decide"], height=0.3)
            axes.barh(row, agent.transfer_s, left=decided_s, color=COLORS["transfer"], height=0.3)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("seconds after the loss of the host")
    axes.set_title("A host is lost with its memory: from there until training is where it had been")
    handles = [axes.barh(0, 0, color=color, label=name) for name, color in COLORS.items()]
    axes.legend(handles=handles, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_parts(axes: Any, timelines: dict[str, Timeline]) -> None:
    names = [name for name in MEANINGS if name not in SHARED_PHASES]
    height = 0.8 / len(timelines)
    for place, (source, timeline) in enumerate(timelines.items()):
        for row, name in enumerate(names):
            took_s = timeline.took_s(name)
            if took_s <= 0:
                continue
            at = row + (place - (len(timelines) - 1) / 2) * height
            axes.barh(at, took_s, color=COLORS[name], alpha=1 - 0.5 * place, height=0.9 * height)
            axes.text(took_s, at, f" {source} {took_s:.3f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("seconds of each phase, without those of which nothing depends on where the state is")
    axes.spines[["top", "right"]].set_visible(False)
