"""The simulation: failures arrive, versions are found or lost, training goes on from what is left.

The events are failures, ends of recoveries and, counted rather than played one by one, saves between them.
Time between failures is exponentially distributed, with a rate in proportion to the hosts. A failure during a
recovery begins it anew. The same seed gives the same failures to every strategy.

Invariants: a version counts once `commit_s` has passed since its iteration ended, and not if a failure comes
before; memory that a failure took stays empty until a new version counts; the version gone back to is the
newest that memory or the store holds whole; wall time is useful work and what is counted as lost, stalled,
retrieving or restarting.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from benchmarks.wasted_time.parameters import DAY_S, Parameters, Strategy
from waystation.memory import Placement


@dataclass
class Outcome:
    """What happened, in seconds and numbers of failures.

    Attributes:
        wall_s: All of it.
        useful_s: Work that was not lost.
        lost_s: Work that was done in vain.
        stalled_s: For which saves halted training.
        retrieval_s: For which the state was fetched.
        restart_s: For which failures were noticed and processes started.
    """

    failures: int = 0
    wall_s: float = 0.0
    useful_s: float = 0.0
    lost_s: float = 0.0
    stalled_s: float = 0.0
    retrieval_s: float = 0.0
    restart_s: float = 0.0
    from_own_memory: int = 0
    from_peers: int = 0
    from_store: int = 0

    @property
    def wasted_per_failure_s(self) -> float:
        """GEMINI's measure: the work that was lost, and the retrieval."""
        return (self.lost_s + self.retrieval_s) / self.failures

    @property
    def retrieval_per_failure_s(self) -> float:
        """The retrieval alone; of a recovery that was interrupted, what there was of it."""
        return self.retrieval_s / self.failures

    @property
    def effective_share(self) -> float:
        """The part of the time that was useful work."""
        return self.useful_s / self.wall_s

    @property
    def memory_share(self) -> float:
        """The part of the recoveries that needed no store."""
        return 1 - self.from_store / (self.from_own_memory + self.from_peers + self.from_store)


@dataclass
class _Versions:
    """The newest version in memory and in the store, as the work that it holds.

    Attributes:
        in_memory: None where memory holds none that is of use.
        emptied: Hosts whose memory was lost since then.
        store_begun_s: When the newest save to the store that counts was begun.
    """

    in_memory: float | None = None
    emptied: set[int] = field(default_factory=set)
    in_store: float = 0.0
    store_begun_s: float = 0.0


class Simulation:
    """One program on so many hosts, with one strategy, until it has failed so many times."""

    def __init__(self, strategy: Strategy, placement: Placement, parameters: Parameters, seed: int) -> None:
        self._strategy = strategy
        self._placement = placement
        self._parameters = parameters
        self._failures_per_s = parameters.failures_per_host_day * placement.host_count / DAY_S
        # Apart, so that all strategies see the same failures whatever else they draw.
        self._times = random.Random(f"times {seed}")
        self._victims = random.Random(f"victims {seed}")
        self._work_per_save_s = strategy.save_every * parameters.iteration_s
        self._period_s = self._work_per_save_s + strategy.stall_s
        self._versions = _Versions()
        self._reached = 0.0
        self._failure_at_s = 0.0

    def run(self, failures: int) -> Outcome:
        """Plays until the recovery from the last of the failures has ended or was interrupted."""
        outcome = Outcome()
        self._failure_at_s = self._gap_s()
        while outcome.failures < failures:
            self._train(outcome)
            took_memory = self._fail(outcome)
            while not self._recover(outcome, took_memory) and outcome.failures < failures:
                took_memory |= self._fail(outcome)
        outcome.useful_s = self._reached
        return outcome

    def _gap_s(self) -> float:
        return self._times.expovariate(self._failures_per_s)

    def _train(self, outcome: Outcome) -> None:
        """Works until the failure, and finds which saves count by then."""
        strategy, start, spent_s = self._strategy, self._reached, self._failure_at_s - outcome.wall_s
        periods, rest_s = divmod(spent_s, self._period_s)
        done_s = periods * self._work_per_save_s + min(rest_s, self._work_per_save_s)
        outcome.stalled_s += spent_s - done_s
        # A save begins when its iterations have ended, before the stall that it causes.
        if strategy.uses_memory:
            saved = (spent_s - strategy.commit_s + strategy.stall_s) // self._period_s
            if saved >= 1:
                self._versions.in_memory = start + saved * self._work_per_save_s
                self._versions.emptied = set()
        self._save_to_store(outcome.wall_s, spent_s)
        self._reached = start + done_s
        outcome.wall_s = self._failure_at_s

    def _save_to_store(self, start_s: float, spent_s: float) -> None:
        """The saves to the store of a time of training: at ends of iterations, an interval apart."""
        strategy, versions, work_s = self._strategy, self._versions, self._parameters.iteration_s
        iteration_s = work_s * self._period_s / self._work_per_save_s
        due_s = max(0.0, versions.store_begun_s + strategy.store_interval_s - start_s)
        first = max(1.0, -(-due_s // iteration_s))
        between = -(-strategy.store_interval_s // iteration_s)
        later = (spent_s - strategy.store_s - first * iteration_s) // (between * iteration_s)
        if later >= 0:
            begun = first + later * between
            versions.in_store = self._reached + begun * work_s
            versions.store_begun_s = start_s + begun * iteration_s

    def _fail(self, outcome: Outcome) -> bool:
        """Takes what the failure takes; tells whether that was memory."""
        outcome.failures += 1
        self._failure_at_s += self._gap_s()
        if self._victims.random() >= self._parameters.memory_lost_share:
            return False
        hosts = range(self._placement.host_count)
        self._versions.emptied.update(self._victims.sample(hosts, self._parameters.hosts_per_failure))
        return True

    def _recover(self, outcome: Outcome, took_memory: bool) -> bool:
        """Goes back to the newest version, unless another failure comes meanwhile."""
        versions, strategy = self._versions, self._strategy
        if versions.in_memory is not None and not self._is_whole():
            versions.in_memory = None
        restart_s = self._parameters.restart_s if took_memory else self._parameters.software_restart_s
        if versions.in_memory is not None and versions.in_memory < versions.in_store:
            versions.in_memory = None
        if versions.in_memory is None:
            version, retrieval_s = versions.in_store, strategy.store_s
        else:
            version, retrieval_s = versions.in_memory, strategy.peer_s if versions.emptied else strategy.own_s
        outcome.lost_s += self._reached - version
        self._reached = version
        available_s = self._failure_at_s - outcome.wall_s
        outcome.restart_s += min(restart_s, available_s)
        outcome.retrieval_s += min(retrieval_s, max(0.0, available_s - restart_s))
        if restart_s + retrieval_s > available_s:
            outcome.wall_s = self._failure_at_s
            return False
        outcome.wall_s += restart_s + retrieval_s
        if versions.in_memory is None:
            outcome.from_store += 1
        elif versions.emptied:
            outcome.from_peers += 1
        else:
            outcome.from_own_memory += 1
        return True

    def _is_whole(self) -> bool:
        """Whether every shard has a holder whose memory is not empty."""
        emptied = self._versions.emptied
        # A shard without copies has its owner among the emptied.
        return not any(emptied.issuperset(self._placement.holders(host)) for host in emptied)
