"""The orders of all islands, from the submission of a work to its end.

What drives it: `submit` and `drop_client`, `prepared` when hosts know lists, `done` when a host is done,
`lose` when a gang is lost, `give_up` at a deadline. What it emits is in `effects`, in the order in which it
is to be carried out; a work that ends is told so (`Work.on_end`). Invariants: a work that was submitted ends,
whatever fails; the hosts of an island begin works in one order, in which those that wait for memory can be
overtaken (`IslandOrder.next_in_line`); a work that has failed before it began takes its place in the order
and nothing else; a work begins only when the loads of what it uses have ended, so that no host has to wait
for a load before it goes on to the works of other clients. A transfer, a save or a load, takes no time of
devices: once it has begun, schedulers no longer count it. Nor do they count what waits for memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from waystation._errors import Cancelled, WaystationError
from waystation.runtime.controller.islands import IslandOrder, MemoryLimits, instructions_of
from waystation.runtime.controller.observer import Observer
from waystation.runtime.controller.works import Abandon, Begin, Effect, ForgetLists, Prepare, Release, Work
from waystation.runtime.messages import Done, Message
from waystation.runtime.objects import Handle
from waystation.runtime.scheduling import (
    Dispatch,
    Policy,
    Routed,
    RunKey,
    Sequencer,
    SpanningSubmission,
    Submission,
)

ErrorOf = Callable[[Work], WaystationError]


class Orders:
    """See above.

    Args:
        make_policy: Makes what chooses whose turn it is, for each island and for works that span islands.
        failure_of: Why a run has failed; None if it has not.

    Attributes:
        effects: What is to be carried out, in order; whoever carries it out empties it.
        observer: Is told how works go on.
        loads: Works that load arrays and have not ended, from when they are made.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        failure_of: Callable[[RunKey], WaystationError | None] = lambda run: None,
    ) -> None:
        self.effects: list[Effect] = []
        self.observer: Observer = Observer()
        self.loads: set[RunKey] = set()
        self._make_policy = make_policy
        self._failure_of = failure_of
        self._islands: dict[str, IslandOrder] = {}
        self._sequencer = Sequencer(make_policy())
        self._works: dict[RunKey, Work] = {}
        self._by_number: dict[int, Work] = {}
        self._held: dict[int, Work] = {}
        self._preparations: dict[int, tuple[str, int, int]] = {}
        # Lists that are to be forgotten as soon as hosts have them.
        self._unwanted: dict[tuple[str, int, int], ForgetLists] = {}
        self._needing: dict[int, list[Work]] = {}  # by number of the preparation
        self._told: dict[int, list[Callable[[WaystationError | None], None]]] = {}  # likewise
        self._numbers = count(1)
        self._losses: dict[str, ErrorOf] = {}
        self._dispatches: deque[Dispatch] = deque()
        self._looked_at: set[str] = set()  # islands of which the first in line may begin
        self._is_settling = False

    # ---- islands -------------------------------------------------------------------------------

    def add_island(self, name: str, hosts: Mapping[str, int], limits: MemoryLimits) -> None:
        """An island is there. One that has the name of another that is gone goes on with its order: clients
        and the sequencer count on, and what is late is of an epoch before."""
        if name in self._islands:
            self._islands[name].begin_anew(hosts, limits)
        else:
            self._islands[name] = IslandOrder(name, hosts, limits, self._make_policy())

    def remove_island(self, name: str, error_of: ErrorOf) -> None:
        """An island is gone for good; its works fail, each in its turn."""
        self.lose(name, error_of)

    def epochs_before(self, name: str) -> int:
        """How many epochs islands of a name have had that are over."""
        return self._islands[name].epoch - 1 if name in self._islands else 0

    def epoch(self, island: str) -> int:
        """The epoch of an island."""
        return self._islands[island].epoch

    @property
    def is_idle(self) -> bool:
        """Whether all works have ended."""
        return not self._works

    def pending(self, island: str) -> int:
        """How many works an island has."""
        return sum(island in work.parts and not work.parts[island].ended for work in self._works.values())

    def pending_of(self, client: str) -> int:
        """How many works a client has."""
        return sum(work.key.client == client for work in self._works.values())

    def is_at(self, number: int, island: str, host: str) -> bool:
        """Whether a host has a part of a work that it has not ended, or is yet to begin."""
        work = self._by_number.get(number)
        part = None if work is None else work.parts.get(island)
        return part is not None and not part.ended and (not part.begun or host in part.unfinished)

    def memory_bytes(self, island: str, host: str) -> tuple[int, int] | None:
        """What is taken on all devices of a host, and spilled there; None if there is no limit."""
        return self._islands[island].memory_bytes(host)

    def lose(self, name: str, error_of: ErrorOf) -> None:
        """The gang of an island is lost: what it has begun, or was going to, fails; the next epoch begins."""
        island = self._islands[name]
        self._losses[name] = error_of
        touched = [work for work in self._works.values() if name in work.parts and not work.parts[name].ended]
        errors: dict[int, WaystationError] = {}  # what is lost because of another has the error of that
        for work in touched:
            if work.error is None:
                cause = next((errors[run.run] for run in work.uses if run.run in errors), None)
                work.error = cause or error_of(work)
                self._abandon(work)
            errors.setdefault(work.key.run, work.error)
        placed = {work.key for work in touched} & {*island.scheduler.in_flight}
        self._dispatches.extend(island.restart())
        for work in touched:
            part = work.parts[name]
            part.admitted, part.unadmitted, part.moves = set(), set(), {}
            if work.number in self._held:
                self._line_up(self._held.pop(work.number))
            elif work.key in placed or part.begun:
                self._end_part(name, work)
        self._settle()

    # ---- works ---------------------------------------------------------------------------------

    def prepare(self, name: str, subgraph: int, work: Work, make: Callable[[int], Prepare]) -> None:
        """Has hosts be given the lists of a work, once in an epoch; it begins when they have them.

        Args:
            name: The island.
            subgraph: The number of the subgraph.
            work: The work, which may be submitted later.
            make: Makes the effect, of its number.
        """
        island = self._islands[name]
        if subgraph in island.lists:
            work.error = work.error or island.lists[subgraph]
            return
        number = self._preparation(island, subgraph, make)
        self._needing[number].append(work)
        work.needs.add(number)

    def prepare_ahead(
        self,
        name: str,
        subgraph: int,
        make: Callable[[int], Prepare],
        then: Callable[[WaystationError | None], None],
    ) -> None:
        """Has hosts be given lists that no work needs yet; `then` is told what came of that."""
        island = self._islands[name]
        if subgraph in island.lists:
            then(island.lists[subgraph])
        else:
            self._told.setdefault(self._preparation(island, subgraph, make), []).append(then)

    def _preparation(self, island: IslandOrder, subgraph: int, make: Callable[[int], Prepare]) -> int:
        key = island.name, island.epoch, subgraph
        number = next((number for number, known in self._preparations.items() if known == key), None)
        if number is None:
            number = next(self._numbers)
            self._preparations[number] = key
            self._needing[number] = []
            self.effects.append(make(number))
        return number

    def prepared(self, number: int, error: WaystationError | None) -> None:
        """Hosts have been given lists, or cannot use them."""
        key = name, epoch, subgraph = self._preparations.pop(number)
        island = self._islands.get(name)
        unwanted = self._unwanted.pop(key, None)
        if island is not None and island.epoch == epoch:
            if unwanted is None:
                island.lists[subgraph] = error
            else:
                self.effects.append(unwanted)
        for work in self._needing.pop(number):
            work.needs.discard(number)
            work.error = work.error or error
            self._line_up_held(work)
        for then in self._told.pop(number, ()):
            then(error)
        self._settle()

    def forget(self, name: str, subgraph: int, lists: dict[str, str]) -> None:
        """Has hosts forget the lists of a subgraph, if they have them, or when they have been given them.

        Args:
            name: The island.
            subgraph: The number of the subgraph, which no work uses any more.
            lists: What the list of each host is known by.
        """
        island = self._islands.get(name)
        if island is None:
            return
        key = name, island.epoch, subgraph
        effect = ForgetLists(name, island.epoch, lists)
        if key in self._preparations.values():
            self._unwanted[key] = effect
        elif subgraph in island.lists:
            del island.lists[subgraph]
            self.effects.append(effect)

    def submit(self, work: Work) -> None:
        """Takes a work."""
        self._works[work.key] = work
        self._by_number[work.number] = work
        self.observer.submitted(work)
        for name, part in work.parts.items():
            island = self._islands.get(name)
            if work.error is None and (island is None or island.epoch != part.epoch):
                work.error = self._losses[name](work)  # while it waited for what comes before it
        work.awaits = self.loads.intersection(work.uses)
        if (work.needs or work.awaits) and work.error is None:
            self._held[work.number] = work
        else:
            self._line_up(work)
        self._settle()

    def done(self, island: str, epoch: int, host: str, done: Done) -> None:
        """A host is done with a work; what it says of an epoch before does not count."""
        work = self._by_number.get(done.work)
        if work is None or island not in self._islands or epoch != self._islands[island].epoch:
            return
        part = work.parts[island]
        part.unfinished.discard(host)
        part.device_seconds = max(part.device_seconds, done.device_seconds)
        work.fetched[host] = done.fetched
        work.said[host] = done.said
        if done.error is not None and (work.error is None or _is_hearsay(work.error, done.error)):
            # A host may have forgotten already what a run was to make that has failed meanwhile.
            work.error = self._failure(work) or done.error.where(
                program=work.program, computation=work.computation, host=host
            )
        if not part.unfinished:
            self._end_part(island, work)
        self._settle()

    def give_up(self, island: str, number: int) -> None:
        """A work has waited long enough for memory."""
        work = self._by_number.get(number)
        if work is not None and island in self._islands:
            self.effects += self._islands[island].give_up(work, self._works)
            self._looked_at.add(island)
            self._settle()

    def release(self, hosts: Iterable[tuple[str, str, tuple[Handle, ...]]]) -> None:
        """Hosts are to forget buffers: island, host and handles of each."""
        for name, host, handles in hosts:
            island = self._islands.get(name)
            if island is not None:
                self.effects.append(Release(name, host, handles))
                self.effects += island.free(host, handles, self._works)
                self._looked_at.add(name)
        self._settle()

    def drop_client(self, client: str) -> None:
        """A client has died: what has no place in the order yet gets none."""
        gone = Cancelled(f"client '{client}' has left")
        for work in [work for work in self._held.values() if work.key.client == client]:
            del self._held[work.number]
            self._drop(work, gone)
        for island in self._islands.values():
            dropped, dispatches = island.scheduler.drop_client(client)
            self._dispatches.extend(dispatches)
            for submission in dropped:
                self._drop(self._works[submission.key], gone)
        spanning, routed = self._sequencer.drop_client(client)
        self._route(routed)
        for each in spanning:
            self._drop(self._works[each.key], gone)
        self._settle()

    # ---- how ------------------------------------------------------------------------------------

    def _line_up_held(self, work: Work) -> None:
        """Lines a work up that was held, if there is nothing more that it is held for."""
        if work.number in self._held and (work.error is not None or not (work.needs or work.awaits)):
            self._line_up(self._held.pop(work.number))

    def _line_up(self, work: Work) -> None:
        if work.order is None:
            ((name, part),) = work.parts.items()
            submission = Submission(
                work.key, work.fingerprint, part.position, work.cost_seconds, work.priority
            )
            self._route([(name, submission)])
        else:
            positions = tuple((name, part.position) for name, part in sorted(work.parts.items()))
            spanning = SpanningSubmission(
                work.key, work.fingerprint, work.order, positions, work.cost_seconds, work.priority
            )
            self._route(self._sequencer.submit(spanning))

    def _route(self, routed: Iterable[Routed]) -> None:
        for name, submission in routed:
            island = self._islands.get(name)
            if island is not None:
                self._dispatches.extend(island.scheduler.submit(submission))
            else:
                self._end_part(name, self._works[submission.key])

    def _settle(self) -> None:
        """Goes on until nothing more follows from what has happened."""
        if self._is_settling:
            return
        self._is_settling = True
        try:
            while self._dispatches or self._looked_at:
                while self._dispatches:
                    self._place(self._dispatches.popleft())
                if self._looked_at:
                    self._begin(self._looked_at.pop())
        finally:
            self._is_settling = False

    def _place(self, dispatch: Dispatch) -> None:
        """A work has its place in the order of an island."""
        island = self._islands.get(dispatch.island)
        work = self._works.get(dispatch.key)
        if island is None or work is None or dispatch.epoch != island.epoch:
            return
        self.observer.scheduled(work, island.name)
        if work.error is None and work.parts[island.name].epoch == island.epoch:
            self.effects += island.reserve(work, self._works)
        island.line.append(work)
        self._looked_at.add(island.name)

    def _begin(self, name: str) -> None:
        """Begins works that have their turn and their memory."""
        island = self._islands.get(name)
        while island is not None:
            for each in island.line:
                each.error = each.error or self._failure(each)
            work, effects = island.next_in_line(self._works)
            self.effects += effects
            if work is None:
                for each in island.line:
                    self._dispatches.extend(island.scheduler.park(each.key))
                return
            island.scheduler.unpark(work.key)
            if work.error is not None:
                self._end_part(name, work)
            else:
                self._begin_work(island, work)

    def _begin_work(self, island: IslandOrder, work: Work) -> None:
        name, part = island.name, work.parts[island.name]
        self.observer.admitted(work, name)
        part.begun, part.unfinished = True, set(part.hosts)
        messages = {
            host: Message(work.number, work.program, instructions_of(each, part.moves.get(host, ())))
            for host, each in part.hosts.items()
        }
        self.effects.append(Begin(name, island.epoch, work, messages))
        self.observer.dispatched(work, name)
        if work.is_transfer:
            self._dispatches.extend(island.scheduler.complete(work.key))

    def _failure(self, work: Work) -> WaystationError | None:
        """Why something that a work uses was not made."""
        failures = map(self._failure_of, work.uses)
        return next((error for error in failures if error is not None), None)

    def _end_part(self, name: str, work: Work) -> None:
        part = work.parts[name]
        if part.ended:
            return
        part.ended, part.unfinished = True, set()
        seconds = part.device_seconds if part.begun and work.error is None else None
        island = self._islands.get(name)
        if island is not None:
            self.effects += island.finish(work, self._works)
            self._dispatches.extend(island.scheduler.complete(work.key, seconds))
            self._looked_at.add(name)
        if work.error is not None:
            self._abandon(work)
        if work.has_ended:
            self._end(work)

    def _abandon(self, work: Work) -> None:
        """Hosts that have begun what fails do not wait for its data; where it waits for memory, it ends."""
        assert work.error is not None
        if sum(len(part.hosts) for part in work.parts.values()) == 1:
            return
        for name, part in work.parts.items():
            if part.begun and name in self._islands:
                hosts = tuple(sorted(part.hosts))
                self.effects.append(Abandon(name, hosts, work.number, work.error, work.has_ended))
            elif not part.ended:
                self._looked_at.add(name)

    def _drop(self, work: Work, error: WaystationError) -> None:
        """Ends a work that has no place in any order."""
        work.error = work.error or error
        for part in work.parts.values():
            part.ended = True
        self._end(work)

    def _end(self, work: Work) -> None:
        if self._works.pop(work.key, None) is None:
            return
        del self._by_number[work.number]
        self.observer.completed(work)
        if work.order is not None:
            seconds = max(part.device_seconds for part in work.parts.values())
            self._route(self._sequencer.complete(work.key, seconds if work.error is None else None))
        work.on_end(work)
        if work.key in self.loads:
            self.loads.discard(work.key)
            for held in list(self._held.values()):
                if work.key in held.awaits:
                    held.awaits.discard(work.key)
                    self._line_up_held(held)


def _is_hearsay(error: WaystationError, other: WaystationError) -> bool:
    """Whether a host has an error from a peer only, which may be the one that the other comes from."""
    return "peer" in error.context and "peer" not in other.context
