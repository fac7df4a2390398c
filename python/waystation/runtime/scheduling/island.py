"""The gang scheduler of one island: one order of all runs, which every host of the island follows.

A pure machine. What drives it: `submit` (from clients, or from the `Sequencer` where a run spans islands),
`complete` when the hosts report that a run is done, `park` while a run waits for memory, `drop_client` on a
client's death, `restart` when the gang of hosts is rebuilt. What it emits: a `Dispatch` for each run that has
its place in the order now; every host gets it, in any order of delivery (`ReorderBuffer`).

Runs are dispatched ahead of the devices, but only so far (`seconds_ahead` of device time or `least_in_flight`
runs, `runs_per_client` of each client): what waits here can still be overtaken, what has been dispatched
cannot. Of clients whose turn it could be those of the highest priority are left, and the policy chooses among
them. Invariants: sequence numbers of an epoch have no gaps; each client's runs keep the client's order; runs
with tickets are dispatched in the order of their tickets, without gaps, so that all islands order them alike
(`sequencer.py` says why that cannot deadlock). A client whose next run has a later ticket gives its priority
to the one whose turn that is.
"""

from __future__ import annotations

from collections import Counter

from waystation._errors import InvalidInput
from waystation.runtime.scheduling.costs import CostEstimates
from waystation.runtime.scheduling.policies import Candidate, FirstInFirstOut, Policy
from waystation.runtime.scheduling.queues import ClientQueues
from waystation.runtime.scheduling.submissions import Dispatch, RunKey, Submission


class IslandScheduler:
    """Orders the runs of one island.

    Args:
        island: Its name.
        policy: Who comes next; first in first out if it is not given.
        seconds_ahead: No run is dispatched while those in flight are expected to take longer than this,
        least_in_flight: and there are so many. With two, devices have something to do while it is told that
            they have ended the other.
        runs_per_client: How many runs of one client may be in flight.
    """

    def __init__(
        self,
        island: str,
        policy: Policy | None = None,
        *,
        seconds_ahead: float = 0.005,
        least_in_flight: int = 1,
        runs_per_client: int = 16,
    ) -> None:
        if seconds_ahead <= 0 or min(least_in_flight, runs_per_client) < 1:
            raise InvalidInput(f"island '{island}' must let at least one run be in flight")
        self.island = island
        self.epoch: int = 1
        self._policy = policy if policy is not None else FirstInFirstOut()
        self._seconds_ahead = seconds_ahead
        self._least_in_flight = least_in_flight
        self._runs_per_client = runs_per_client
        self._costs = CostEstimates()
        self._queues: ClientQueues[Submission] = ClientQueues()
        self._in_flight: dict[RunKey, tuple[Submission, float]] = {}
        self._parked: dict[RunKey, tuple[Submission, float]] = {}
        self._client_counts: Counter[str] = Counter()
        self._ticket_holders: dict[int, str] = {}
        self._next_ticket = 0
        self._next_sequence = 0

    @property
    def in_flight(self) -> tuple[RunKey, ...]:
        """The runs that have been dispatched and are not complete; those that are parked first."""
        return (*self._parked, *self._in_flight)

    @property
    def waiting_count(self) -> int:
        """How many runs are in line."""
        return len(self._queues)

    def submit(self, submission: Submission) -> list[Dispatch]:
        """Takes a run; returns what is dispatched now.

        Raises:
            Conflict: The client has submitted another one at that position.
        """
        client = submission.key.client
        self._queues.add(client, submission.position, submission)
        if submission.ticket is not None:
            self._ticket_holders[submission.ticket] = client
        return self._dispatch()

    def complete(self, key: RunKey, device_seconds: float | None = None) -> list[Dispatch]:
        """Notes that a run is done; returns what is dispatched now.

        Args:
            key: The run; one of an epoch before counts no more.
            device_seconds: What it has taken on the devices of the island, if that is known.
        """
        self.unpark(key)
        if key not in self._in_flight:
            return []
        submission, charged = self._in_flight.pop(key)
        self._client_counts[key.client] -= 1
        if not self._client_counts[key.client]:
            del self._client_counts[key.client]
        if device_seconds is not None:
            self._costs.learn(submission.program, device_seconds)
            self._policy.charge(key.client, device_seconds - charged)
        return self._dispatch()

    def park(self, key: RunKey) -> list[Dispatch]:
        """A run that has its place waits for something else than devices: it takes no room of others. Its
        client's next runs wait for it, unless they have tickets.

        Returns:
            What is dispatched now.
        """
        if key not in self._in_flight:
            return []
        self._parked[key] = self._in_flight.pop(key)
        return self._dispatch()

    def unpark(self, key: RunKey) -> None:
        """It goes on."""
        if key in self._parked:
            self._in_flight[key] = self._parked.pop(key)

    def drop_client(self, client: str) -> tuple[list[Submission], list[Dispatch]]:
        """A client has died: what has no place in the order yet gets none.

        Runs with tickets keep their turns, since other islands may have begun them.

        Returns:
            The runs that will not be dispatched, and what is dispatched now.
        """
        dropped = self._queues.drop(client, keep=lambda run: run.ticket is not None)
        self._policy.forget(client)
        return dropped, self._dispatch()

    def restart(self) -> tuple[list[Submission], list[Dispatch]]:
        """The gang of hosts has been rebuilt: a new epoch begins.

        Returns:
            The runs that were in flight, which are lost, and what is dispatched in the new epoch.
        """
        lost = [submission for submission, _ in (*self._parked.values(), *self._in_flight.values())]
        self._parked.clear()
        self._in_flight.clear()
        self._client_counts.clear()
        self.epoch += 1
        self._next_sequence = 0
        return lost, self._dispatch()

    # ---- how ------------------------------------------------------------------------------------

    def _dispatch(self) -> list[Dispatch]:
        found = []
        while self._is_room() and (candidates := self._candidates()):
            client = self._policy.choose(candidates)
            run = self._queues.pop(client)
            cost = self._cost(run)
            self._policy.charge(client, cost)
            self._in_flight[run.key] = run, cost
            self._client_counts[client] += 1
            if run.ticket is not None:
                del self._ticket_holders[run.ticket]
                self._next_ticket += 1
            found.append(Dispatch(self.island, self.epoch, self._next_sequence, run.key, run.program))
            self._next_sequence += 1
        return found

    def _is_room(self) -> bool:
        if len(self._in_flight) < self._least_in_flight:
            return True
        return sum(cost for _, cost in self._in_flight.values()) < self._seconds_ahead

    def _candidates(self) -> list[Candidate]:
        """The clients of the highest priority whose next run could be dispatched."""
        heads = self._queues.heads()
        if not heads:
            return []
        able: dict[str, int] = {}
        lent = None  # the highest priority of those that wait for the next ticket
        parked = {key.client for key in self._parked}
        for client, head in heads.items():
            run = head.run
            if run.ticket not in (None, self._next_ticket):
                lent = run.priority if lent is None else max(lent, run.priority)
            elif client in parked and run.ticket is None:
                continue
            elif self._client_counts[client] < self._runs_per_client:
                able[client] = run.priority
        if not able:
            return []
        holder = self._ticket_holders.get(self._next_ticket)
        if holder in able and lent is not None:
            able[holder] = max(able[holder], lent)
        highest = max(able.values(), default=0)
        return [
            Candidate(client, heads[client].arrival, self._cost(heads[client].run))
            for client, level in able.items()
            if level == highest
        ]

    def _cost(self, run: Submission) -> float:
        return self._costs.estimate(run.program) if run.cost_seconds is None else run.cost_seconds
