"""The constants of the simulation, each with where it is from, and what they make of each strategy.

Nothing is measured here. By default every constant is the paper's (GEMINI, SOSP 2023), follows from its
figures, or is assumed, and says so; a JSON file replaces some by what was measured:

    {"copy_bytes_per_s": {"value": 2.1e10, "source": "measured: python -m benchmarks…"}}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DAY_S = 86_400.0


def _constant(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class Parameters:
    """The constants.

    Attributes:
        sources: Where those are from that are not the defaults.
    """

    state_bytes: float = _constant(1.2e12, "paper: 100 billion parameters with Adam, 12 bytes each")
    store_bytes_per_s: float = _constant(2.5e9, "paper: a store of 20 Gb/s, shared by all hosts")
    iteration_s: float = _constant(
        60.0, "follows: saving every iteration is 8 x as often as the store allows"
    )
    link_bytes_per_s: float = _constant(50e9, "paper: 400 Gb/s for each host")
    copies: int = _constant(2, "paper: of each shard, its own host's included")
    store_interval_s: float = _constant(
        10_800.0, "paper: with copies in memory, the store gets one every 3 h"
    )
    gemini_retrieval_bytes_per_s: float = _constant(
        39e9, "follows: up to 250 x faster than the store, 16 hosts"
    )
    copy_bytes_per_s: float = _constant(7.7e9, "assumed: one core copies and sums; hosts have more")
    link_share: float = _constant(0.5, "assumed: the most that replication may take of the link")
    commit_s: float = _constant(0.1, "assumed: the rounds after the last copy is verified")
    stall_s: float = _constant(0.0, "paper: saving every iteration slows training by nothing measurable")
    retrieval_bytes_per_s: float = _constant(39e9, "assumed: no faster than GEMINI's")
    failures_per_host_day: float = _constant(
        110 / 60 / (992 / 8), "follows: OPT-175B, 110 failures in two months on 992 GPUs, 8 to a host"
    )
    hosts_per_failure: int = _constant(1, "assumed: hosts fail one by one")
    memory_lost_share: float = _constant(
        1.0, "assumed: every failure takes its host's memory, the harder case"
    )
    restart_s: float = _constant(720.0, "paper: about 12 min from a hardware failure until training goes on")
    software_restart_s: float = _constant(420.0, "paper: about 7 min from a software failure")
    sources: Mapping[str, str] = field(default_factory=dict)

    def described(self) -> list[tuple[str, float, str]]:
        """Every constant: its name, value and source."""
        return [
            (entry.name, getattr(self, entry.name), self.sources.get(entry.name, entry.metadata["source"]))
            for entry in dataclasses.fields(self)
            if entry.name != "sources"
        ]


def read_parameters(path: Path | None, measured: Mapping[str, Any] | None = None) -> Parameters:
    """The defaults, with measured ones in their place, and those of a file in the place of both.

    Raises:
        SystemExit: The file names no constant of these, or one without its value or source.
    """
    names = {entry.name for entry in dataclasses.fields(Parameters)} - {"sources"}
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    entries = {**(measured or {}), **({} if path is None else json.loads(path.read_text()))}
    for name, entry in entries.items():
        if name not in names:
            raise SystemExit(f"'{path}': there is no constant '{name}'; there are {', '.join(sorted(names))}")
        if not isinstance(entry, dict) or entry.keys() != {"value", "source"} or not entry["source"]:
            raise SystemExit(f"'{path}': '{name}' needs a \"value\" and a \"source\"")
        values[name], sources[name] = entry["value"], entry["source"]
    return Parameters(**values, sources=sources)


@dataclass(frozen=True)
class Strategy:
    """When a save begins, when it counts, and how long it takes to get back.

    Attributes:
        name: For people.
        uses_memory: Whether hosts keep copies for each other.
        save_every: Iterations from one save to memory to the next.
        commit_s: From the end of its iteration until a save to memory counts.
        stall_s: For which each such save halts training.
        store_interval_s: From the begin of a save to the store to that of the next.
        store_s: For which the state is on its way to the store, or back.
        own_s: For which every host reads its own copy.
        peer_s: For which a host that has lost its memory gets its shard from a peer.
    """

    name: str
    uses_memory: bool
    save_every: int
    commit_s: float
    stall_s: float
    store_interval_s: float
    store_s: float
    own_s: float
    peer_s: float


def strategies(parameters: Parameters, hosts: int) -> list[Strategy]:
    """Remote storage only, GEMINI's published rule, and ours: saves at every step, or as they end."""
    shard_bytes = parameters.state_bytes / hosts
    store_s = parameters.state_bytes / parameters.store_bytes_per_s
    back_to_back_s = _whole(store_s, parameters.iteration_s) * parameters.iteration_s
    remote = Strategy("remote storage", False, 1, math.inf, 0.0, back_to_back_s, store_s, math.inf, math.inf)
    gemini = Strategy(
        "GEMINI's rule",
        uses_memory=True,
        save_every=1,
        commit_s=parameters.iteration_s,  # its traffic is spread over the idle times of an iteration
        stall_s=0.0,
        store_interval_s=parameters.store_interval_s,
        store_s=store_s,
        own_s=shard_bytes / parameters.copy_bytes_per_s,
        peer_s=shard_bytes / parameters.gemini_retrieval_bytes_per_s,
    )
    # The link of a host carries the copies of its shard one after the other.
    replicas_bytes = shard_bytes * (parameters.copies - 1)
    replication_s = replicas_bytes / (parameters.link_bytes_per_s * parameters.link_share)
    commit_s = shard_bytes / parameters.copy_bytes_per_s + replication_s + parameters.commit_s
    ours = dataclasses.replace(
        gemini,
        name="ours",
        save_every=_whole(commit_s, parameters.iteration_s + parameters.stall_s),
        commit_s=commit_s,
        stall_s=parameters.stall_s,
        peer_s=shard_bytes / parameters.retrieval_bytes_per_s,
    )
    return [remote, gemini, ours]


def _whole(duration_s: float, iteration_s: float) -> int:
    """How many iterations something takes that begins at the end of one."""
    return max(1, math.ceil(duration_s / iteration_s - 1e-9))
