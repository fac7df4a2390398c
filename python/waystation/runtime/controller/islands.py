"""One island as the controller knows it: its order, the memory of its hosts, the lists that they know."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from waystation._errors import WaystationError
from waystation.runtime.controller.works import Effect, HostPart, Stall, Work
from waystation.runtime.messages import Instruction, Restore, Spill
from waystation.runtime.objects import Admit, Decision, Handle, HostMemory, Refuse, Stalled
from waystation.runtime.objects import Restore as RestoreDecision
from waystation.runtime.objects import Spill as SpillDecision
from waystation.runtime.scheduling import Dispatch, IslandScheduler, Policy, RunKey

_LEAST_IN_FLIGHT = 2
_MOST_OVERTAKEN = 64


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """How much arrays may take on each host of an island.

    Attributes:
        device_bytes: On each device; None for no limit.
        spill_bytes: In host memory, of what devices have no room for.
    """

    device_bytes: int | None = None
    spill_bytes: int = 0


class IslandOrder:
    """Works of one island, from when they are in line until they have begun.

    Args:
        name: The island.
        hosts: Its hosts, with the number of devices of each.
        limits: Of each host.
        policy: Whose turn it is.

    Attributes:
        scheduler: Gives works their places.
        line: Works that have their places and have not begun.
        lists: By number of the subgraph, what came of giving hosts its lists: an error, or None.
    """

    def __init__(self, name: str, hosts: Mapping[str, int], limits: MemoryLimits, policy: Policy) -> None:
        self.name = name
        self.scheduler: IslandScheduler = IslandScheduler(name, policy, least_in_flight=_LEAST_IN_FLIGHT)
        self.line: deque[Work] = deque()
        self.lists: dict[int, WaystationError | None] = {}
        self._hosts = dict(hosts)
        self._limits = limits
        self._memories: dict[str, HostMemory] = {}
        self._moves: defaultdict[str, list[Instruction]] = defaultdict(list)
        self._forget_memory()

    @property
    def epoch(self) -> int:
        """Which gang of hosts it has."""
        return self.scheduler.epoch

    def memory_bytes(self, host: str) -> tuple[int, int] | None:
        """What is taken on all devices of a host, and spilled there; None if there is no limit."""
        memory = self._memories.get(host)
        return None if memory is None else (sum(memory.used_bytes.values()), memory.spilled_bytes)

    def begin_anew(self, hosts: Mapping[str, int], limits: MemoryLimits) -> None:
        """Other hosts take the place of those that are gone."""
        self._hosts = dict(hosts)
        self._limits = limits
        self._forget_memory()

    def restart(self) -> list[Dispatch]:
        """The gang is lost; the next epoch begins."""
        _, dispatches = self.scheduler.restart()
        self.line.clear()
        self.lists.clear()
        self._forget_memory()
        return dispatches

    # ---- the line ------------------------------------------------------------------------------

    def next_in_line(self, works: Mapping[RunKey, Work]) -> tuple[Work | None, list[Effect]]:
        """The work that begins next, or ends since it has failed; it leaves the line.

        A work that waits for memory can be overtaken by those of other clients that share no array with it
        and have all their memory at once. A work that waits for others to end is overtaken 64 times at most;
        one that waits for clients to release arrays as often as it takes: what overtakes it may be what
        releases them. Works over several islands overtake nobody, since all islands keep one order of these.

        Args:
            works: All works.

        Returns:
            The work, if there is one, and what follows from that it has its memory now.
        """
        passed: list[Work] = []
        for work in self.line:
            if not passed or self._may_overtake(work, passed):
                effects: list[Effect] = []
                if work.error is None and passed and self._can_be_admitted(work):
                    effects = self._overtake(work, works)
                if work.error is not None or not work.parts[self.name].unadmitted:
                    self.line.remove(work)
                    for each in passed:
                        each.parts[self.name].overtaken += 1
                    return work, effects
            passed.append(work)
        return None, []

    def _may_overtake(self, work: Work, passed: Iterable[Work]) -> bool:
        if len(work.parts) > 1:
            return False
        handles = work.parts[self.name].handles
        return all(
            each.key.client != work.key.client
            and handles.isdisjoint(each.parts[self.name].handles)
            and (each.parts[self.name].overtaken < _MOST_OVERTAKEN or self._waits_for_clients(each))
            for each in passed
        )

    def _waits_for_clients(self, work: Work) -> bool:
        unadmitted = work.parts[self.name].unadmitted
        return any(self._memories[host].waits_for_clients(work.key) for host in unadmitted)

    def _can_be_admitted(self, work: Work) -> bool:
        unadmitted = work.parts[self.name].unadmitted
        return all(self._memories[host].can_be_admitted(work.key) for host in unadmitted)

    def _overtake(self, work: Work, works: Mapping[RunKey, Work]) -> list[Effect]:
        effects: list[Effect] = []
        for host in sorted(work.parts[self.name].unadmitted):
            effects += self._carry_out(host, self._memories[host].overtake(work.key), works)
        return effects

    # ---- memory --------------------------------------------------------------------------------

    def reserve(self, work: Work, works: Mapping[RunKey, Work]) -> list[Effect]:
        """Asks for the memory of a work that has its place now."""
        part = work.parts[self.name]
        part.unadmitted = {host for host in part.hosts if host in self._memories}
        effects: list[Effect] = []
        for host in sorted(part.unadmitted):
            effects += self._carry_out(
                host, self._memories[host].request(part.hosts[host].reservation), works
            )
        return effects

    def finish(self, work: Work, works: Mapping[RunKey, Work]) -> list[Effect]:
        """Gives back what a work does not leave."""
        part = work.parts[self.name]
        effects: list[Effect] = []
        for host in sorted(part.admitted):
            decisions = self._memories[host].finish(work.key, failed=work.error is not None)
            effects += self._carry_out(host, decisions, works)
        for host in sorted(part.unadmitted):
            effects += self._carry_out(host, self._memories[host].give_up(work.key), works)
        part.admitted, part.unadmitted = set(), set()
        for host, moves in part.moves.items():
            if not part.begun:  # what was to make room for it has been decided: the next message says it
                self._moves[host] = [*moves, *self._moves[host]]
        return effects

    def free(self, host: str, handles: Iterable[Handle], works: Mapping[RunKey, Work]) -> list[Effect]:
        """Objects have ended."""
        memory = self._memories.get(host)
        effects: list[Effect] = []
        if memory is not None:
            for handle in handles:
                effects += self._carry_out(host, memory.free(handle), works)
        return effects

    def give_up(self, work: Work, works: Mapping[RunKey, Work]) -> list[Effect]:
        """A work has waited too long for memory, unless what it waits for now are others that end."""
        effects: list[Effect] = []
        unadmitted = sorted(work.parts[self.name].unadmitted)
        if not any(self._memories[host].is_stalled(work.key) for host in unadmitted):
            return []
        for host in unadmitted:
            effects += self._carry_out(host, self._memories[host].give_up(work.key), works)
        return effects

    def _forget_memory(self) -> None:
        self._moves.clear()
        self._memories.clear()
        if self._limits.device_bytes is not None:
            for host, devices in self._hosts.items():
                budgets = dict.fromkeys(range(devices), self._limits.device_bytes)
                self._memories[host] = HostMemory(host, budgets, self._limits.spill_bytes)

    def _carry_out(
        self, host: str, decisions: Iterable[Decision], works: Mapping[RunKey, Work]
    ) -> list[Effect]:
        effects: list[Effect] = []
        for decision in decisions:
            if isinstance(decision, SpillDecision):
                self._moves[host].append(Spill(decision.handle))
            elif isinstance(decision, RestoreDecision):
                self._moves[host].append(Restore(decision.handle))
            elif isinstance(decision, Admit):
                part = works[decision.run].parts[self.name]
                part.unadmitted.discard(host)
                part.admitted.add(host)
                part.moves[host] = self._moves.pop(host, [])
            elif isinstance(decision, Refuse):
                refused = works[decision.run]
                refused.parts[self.name].unadmitted.discard(host)
                if refused.error is None:
                    refused.error = decision.error.where(
                        program=refused.program, computation=refused.computation
                    )
            elif isinstance(decision, Stalled):
                effects.append(Stall(self.name, works[decision.run].number))
        return effects


def instructions_of(part: HostPart, moves: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """What a host is told: first what makes room."""
    return (*moves, *part.instructions)
