"""One order of all runs that span several islands: a ticket for each, per island without gaps.

Why a global sequencer, and not numbers taken island by island in the order of their names: numbers that are
taken one by one need each island to hold its order still until the next island has given its number (else two
runs can be ordered differently on two islands), so a busy island stalls idle ones. A sequencer costs such
runs one message more, and islands never wait for each other to decide.

Why this cannot deadlock. Let every host run strictly in its island's order, and let a run end only when all
its islands have come to it: the worst case. Say that r comes before s if some island orders them so. A cycle
of that relation would have to pass through several islands, so through runs that span them; between two of
these that follow each other on the cycle there is one island that orders both, directly or by way of its own
runs, and islands order by ticket. So the tickets would grow all around the cycle. There is none; the run that
comes before all others that are not complete can always end. An island dispatches it, too: what is in flight
before it ends for the same reason, its client's earlier runs are before it, and no earlier ticket is left.

A pure machine. What drives it: `submit` from clients, `complete` when a run is done everywhere or lost,
`drop_client`. What it emits: for each run that got its ticket a `Submission` for each of its islands. Tickets
are given no more than `runs_ahead` at a time, by the same policies as those of islands, so that shares and
priorities hold among runs that span islands as well.
"""

from __future__ import annotations

from collections import Counter

from waystation._errors import InvalidInput
from waystation.runtime.scheduling.costs import CostEstimates
from waystation.runtime.scheduling.policies import Candidate, FirstInFirstOut, Policy
from waystation.runtime.scheduling.queues import ClientQueues
from waystation.runtime.scheduling.submissions import RunKey, SpanningSubmission, Submission

Routed = tuple[str, Submission]


class Sequencer:
    """Orders the runs that span several islands.

    Args:
        policy: Who comes next; first in first out if it is not given.
        runs_ahead: How many runs may have a ticket and not be complete.
    """

    def __init__(self, policy: Policy | None = None, *, runs_ahead: int = 16) -> None:
        if runs_ahead < 1:
            raise InvalidInput("the sequencer must let at least one run be in flight")
        self._policy = policy if policy is not None else FirstInFirstOut()
        self._runs_ahead = runs_ahead
        self._costs = CostEstimates()
        self._queues: ClientQueues[SpanningSubmission] = ClientQueues()
        self._in_flight: dict[RunKey, tuple[SpanningSubmission, float]] = {}
        self._tickets: Counter[str] = Counter()

    def submit(self, submission: SpanningSubmission) -> list[Routed]:
        """Takes a run; returns what goes to which island now.

        Raises:
            Conflict: The client has submitted another one at that place of its order.
        """
        self._queues.add(submission.key.client, submission.order, submission)
        return self._give_tickets()

    def complete(self, key: RunKey, device_seconds: float | None = None) -> list[Routed]:
        """Notes that a run is done, or lost; returns what goes to which island now."""
        if key not in self._in_flight:
            return []
        submission, charged = self._in_flight.pop(key)
        if device_seconds is not None:
            self._costs.learn(submission.program, device_seconds)
            self._policy.charge(key.client, device_seconds - charged)
        return self._give_tickets()

    def drop_client(self, client: str) -> tuple[list[SpanningSubmission], list[Routed]]:
        """A client has died: runs without a ticket get none.

        Returns:
            These runs, and what goes to which island now.
        """
        dropped = self._queues.drop(client, keep=lambda run: False)
        self._policy.forget(client)
        return dropped, self._give_tickets()

    def _give_tickets(self) -> list[Routed]:
        routed: list[Routed] = []
        while len(self._in_flight) < self._runs_ahead and (candidates := self._candidates()):
            client = self._policy.choose(candidates)
            run = self._queues.pop(client)
            cost = self._cost(run)
            self._policy.charge(client, cost)
            self._in_flight[run.key] = run, cost
            for island, position in run.positions:
                ticket = self._tickets[island]
                self._tickets[island] += 1
                submission = Submission(
                    run.key, run.program, position, run.cost_seconds, run.priority, ticket
                )
                routed.append((island, submission))
        return routed

    def _candidates(self) -> list[Candidate]:
        heads = self._queues.heads()
        highest = max((head.run.priority for head in heads.values()), default=0)
        return [
            Candidate(client, head.arrival, self._cost(head.run))
            for client, head in heads.items()
            if head.run.priority == highest
        ]

    def _cost(self, run: SpanningSubmission) -> float:
        return self._costs.estimate(run.program) if run.cost_seconds is None else run.cost_seconds
