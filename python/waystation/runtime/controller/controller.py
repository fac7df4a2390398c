"""The controller: what clients ask becomes works in the orders of islands.

A pure machine, of the others: `ResourceManager` has the slices, `Programs` what programs come to, `Arrays`
what there is and whose it is, `Orders` who runs when. What drives it: calls of clients, each client's in its
order, and what happens to islands. What it emits is in `orders.effects`; `on_made` and `on_end` of a call say
when something is there. Invariants: a handle that a client gives to a run, a put or a load is made, or has an
error, in the end; a client that is gone has no slices, and no bytes as soon as its works have ended, other
than under names. A slice on which a shared array lies stays until the name is withdrawn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from itertools import count

from waystation._errors import Conflict, NotFound, WaystationError
from waystation.runtime.controller.array_works import ArrayWorks
from waystation.runtime.controller.arrays import Arrays, StoredArray, require_placed
from waystation.runtime.controller.checkpoints import Checkpoints
from waystation.runtime.controller.clients import Clients
from waystation.runtime.controller.islands import MemoryLimits
from waystation.runtime.controller.lowered import MOST_LOWERED, Dispatch, Programs, Subgraph
from waystation.runtime.controller.orders import ErrorOf, Orders
from waystation.runtime.controller.program_runs import ProgramRun, program_that_brings
from waystation.runtime.controller.suspensions import Suspensions
from waystation.runtime.devices import Island
from waystation.runtime.errors import NoSuchSlice, SliceNotPlaced
from waystation.runtime.ir import Program
from waystation.runtime.objects import Collect, Handle
from waystation.runtime.resources import Placement, ResourceManager, SliceRequest
from waystation.runtime.scheduling import RunKey


class Controller:
    """See above.

    Args:
        most_lowered: See `Programs`.

    Attributes:
        resources: Who has which devices.
        programs: What clients have installed.
        arrays: What there is.
        orders: Who runs when; has the effects.
        clients: Who is there, and the shares of each.
        addresses: Where the transport of each host listens, by the host's name.
        failures: Why islands are lost for good, by their names.
        works: What clients ask that is no program.
        checkpoints: Saves and loads.
        suspensions: Clients that are suspended, and where their arrays are.
    """

    def __init__(self, most_lowered: int = MOST_LOWERED) -> None:
        self.resources: ResourceManager = ResourceManager()
        self.programs: Programs = Programs(self._forget_lists, most_lowered)
        self.arrays: Arrays = Arrays()
        self.clients: Clients = Clients()
        self.orders: Orders = Orders(self.clients.policy, self.arrays.failure_of)
        self.addresses: dict[str, str] = {}
        self.failures: dict[str, WaystationError] = {}
        self._islands: dict[str, Island] = {}
        self.works: ArrayWorks = ArrayWorks(self)
        self.checkpoints: Checkpoints = Checkpoints(self)
        self.suspensions: Suspensions = Suspensions(self)
        self._waiters: dict[Handle, list[Callable[[], None]]] = {}
        self._numbers = count(1)

    # ---- islands -------------------------------------------------------------------------------

    def add_island(self, island: Island, limits: MemoryLimits) -> None:
        """An island is there for the first time."""
        self.orders.add_island(island.name, {host.name: host.device_count for host in island.hosts}, limits)
        self._islands[island.name] = island
        self.failures.pop(island.name, None)
        self.resources.add_island(island)

    def rebuilt(self, name: str) -> None:
        """An island that was lost is there again."""
        self.resources.add_island(self._islands[name])

    def lose(
        self, name: str, why: str, error_of: ErrorOf, array_error_of: Callable[[str], WaystationError]
    ) -> None:
        """The gang of an island is lost.

        Args:
            name: The island.
            why: Who was lost, for people.
            error_of: The error of a work.
            array_error_of: That of an array, by the program that has made it.
        """
        self.resources.remove_island(name)
        self.arrays.lose_devices(self._islands[name].devices, why, array_error_of)
        self.orders.lose(name, error_of)
        self.tell_waiters()

    def remove_island(self, name: str, error: WaystationError) -> None:
        """An island is gone for good."""
        if any(island.name == name for island in self.resources.islands):
            self.resources.remove_island(name)
        self.failures[name] = error
        self.arrays.lose_devices(self._islands.pop(name).devices, error.message, lambda _: error)
        self.orders.remove_island(name, lambda work: error)
        self.tell_waiters()

    # ---- clients and slices --------------------------------------------------------------------

    def add_client(self, name: str) -> str:
        """A client is there; returns what it is known by."""
        client = self.clients.add(name)
        self.arrays.add_client(client)
        return client

    def drop_client(self, client: str) -> None:
        """A client is gone."""
        self.orders.drop_client(client)
        self.collect(self.arrays.drop_client(client))
        self.programs.drop(client)
        self.release_slices(client)
        self.clients.remove(client)

    def release_slices(self, client: str) -> None:
        """Takes back the slices of a client, except those on which shared arrays lie."""
        kept = self.arrays.slices_of_names()
        for found in self.resources.slices:
            if found.client == client and found.number not in kept:
                self.resources.release(found.number)

    def grant(self, client: str, request: SliceRequest) -> int:
        """Grants a slice."""
        return self.resources.grant(client, request).number

    def is_to_wait(self, request: SliceRequest) -> bool:
        """Whether devices for a slice are missing that an island may have which is being rebuilt."""
        return not self.resources.can_grant(request) and self._is_rebuilding_for(request)

    def is_to_wait_for_resuming(self, client: str, without_hosts: Collection[str]) -> bool:
        """Whether devices for the suspended slices of a client are missing in that way."""
        lacking = self.resources.lacking(client, without_hosts)
        return lacking is not None and self._is_rebuilding_for(lacking, without_hosts)

    def _is_rebuilding_for(self, request: SliceRequest, without_hosts: Collection[str] = ()) -> bool:
        there = {island.name for island in self.resources.islands}
        lost = [island for name, island in self._islands.items() if name not in there | self.failures.keys()]
        return any(
            sum(
                host.device_count
                for host in island.hosts
                if host.name not in without_hosts and request.accepts(host)
            )
            >= request.devices
            for island in lost
        )

    def release(self, client: str, number: int) -> None:
        """Takes a slice back, unless a shared array lies on it."""
        self.own_slice(client, number)
        if number in self.arrays.slices_of_names():
            raise Conflict(f"slice {number} has a shared array; withdraw its name first")
        self.resources.release(number)

    def remap(self, client: str, number: int, island: str | None, without_hosts: Collection[str]) -> None:
        """Moves a slice."""
        self.own_slice(client, number)
        self.resources.remap(number, island=island, without_hosts=without_hosts)

    def own_slice(self, client: str, number: int) -> None:
        """Checks that a client may use a slice: its own, or one on which a shared array lies.

        Raises:
            NoSuchSlice: It may not.
        """
        found = self.resources.slice(number)
        if found.client != client and number not in self.arrays.slices_of_names():
            raise NoSuchSlice(f"slice {number} is not of client '{client}'; ask for one")

    def placement(self, number: int) -> Placement:
        """Where a slice is.

        Raises:
            NoSuchSlice: There is none of that number.
            SliceNotPlaced: It has no devices now.
            IslandFailed: Its island is lost for good.
        """
        try:
            return self.resources.placement(number)
        except SliceNotPlaced:
            failed = self.failures.get(self.resources.slice(number).placement.island)
            if failed is not None:
                raise copy.copy(failed) from None
            raise

    def is_waiting(self, numbers: Sequence[int]) -> bool:
        """Whether one of these slices waits for devices."""
        return any(map(self.resources.is_waiting, numbers))

    def kind(self, number: int) -> str:
        """What the devices of a slice are."""
        island = self._islands[self.placement(number).island]
        return island.hosts[0].kind

    # ---- programs ------------------------------------------------------------------------------

    def install(self, client: str, program: Program, dispatch: Dispatch) -> str:
        """Keeps a program for a client, until that forgets it or is gone; returns its fingerprint."""
        return self.programs.install(program, dispatch, client)

    def run(
        self,
        client: str,
        fingerprint: str,
        slices: Sequence[int],
        arguments: Sequence[int],
        results: Sequence[int],
        cost_seconds: float | None,
        priority: int,
    ) -> None:
        """Runs a program; what keeps it from running is in the handles of its results."""
        try:
            run = ProgramRun(self, client, fingerprint, cost_seconds, priority)
        except NotFound as error:
            for own in results:
                self.arrays.fail(client, own, error, self.new_key(client))
        else:
            run.start(slices, arguments, results)

    def prepare(
        self,
        client: str,
        fingerprint: str,
        slices: Sequence[int],
        then: Callable[[WaystationError | None], None],
    ) -> None:
        """Has hosts compile a program before it runs; `then` is told what came of that."""
        ProgramRun(self, client, fingerprint).prepare_ahead(slices, then)

    def bring(
        self, client: str, own: int, stored: StoredArray, placement: Placement, slice_number: int
    ) -> StoredArray:
        """Brings an array of a client to where its slice is now; its handle stands for the copy."""
        program = program_that_brings(stored, len(placement.devices))
        holder = self.new_key(client)
        fingerprint = self.programs.install(program, Dispatch.PARALLEL, holder)
        try:
            copied = ProgramRun(self, client, fingerprint).bring(stored, placement, slice_number)
        finally:
            self.programs.forget(fingerprint, holder)
        self.collect(self.arrays.replace(client, own, copied))
        return copied

    # ---- arrays --------------------------------------------------------------------------------

    def free(self, client: str, handles: Sequence[int]) -> None:
        """A client gives arrays up."""
        self.collect(self.arrays.free(client, handles))

    def when_made(self, client: str, own: int, then: Callable[[], None]) -> None:
        """Calls `then` once an array is there, or has an error.

        Raises:
            ObjectNotFound: There is no such array.
        """
        handle = self.arrays.handle(client, own)
        if self.arrays.is_made(handle):
            then()
        else:
            self._waiters.setdefault(handle, []).append(then)

    def hold(self, client: str, own: int) -> tuple[StoredArray, RunKey]:
        """Keeps an array from ending, whatever its client does; `share` ends that."""
        stored = require_placed(self.arrays.get(client, own), own, client)
        key = self.new_key(client)
        self.arrays.table.use([stored.handle], key)
        return stored, key

    def share(self, held: tuple[StoredArray, RunKey], name: str) -> None:
        """Gives an array that is there a name."""
        stored, key = held
        try:
            failed = self.arrays.error(stored.handle)
            if failed is not None:
                raise copy.copy(failed)
            self.arrays.table.publish(stored.handle, name)
        finally:
            self.collect(self.arrays.finish_run(key))

    def withdraw(self, name: str) -> None:
        """Takes a name back."""
        self.collect(self.arrays.forget(self.arrays.table.withdraw(name)))
        kept = self.arrays.slices_of_names()
        for found in self.resources.slices:
            if found.client not in self.clients and found.number not in kept:
                self.resources.release(found.number)

    def numbers_of_hosts(self, island: str, names: Collection[str]) -> tuple[int, ...]:
        """The places of hosts in the world of their island."""
        hosts = self._islands[island].hosts
        # They are numbered as their names end: `left/10` is the eleventh.
        return tuple(sorted(int(host.name.rpartition("/")[2]) for host in hosts if host.name in names))

    # ---- for works -----------------------------------------------------------------------------

    def new_key(self, client: str) -> RunKey:
        """The key of a call of a client."""
        return RunKey(client, next(self._numbers))

    def new_number(self) -> int:
        """The number of a work."""
        return next(self._numbers)

    def collect(self, collected: Sequence[Collect]) -> None:
        """Has hosts forget what has ended."""
        if not collected:
            return
        by_host: dict[str, list[Collect]] = {}
        for each in collected:
            for host in each.hosts:
                by_host.setdefault(host, []).append(each)
        # The name of a host begins with that of its island.
        self.orders.release(
            (host.rpartition("/")[0], host, tuple(each.handle for each in found))
            for host, found in by_host.items()
        )

    def _forget_lists(self, subgraph: Subgraph) -> None:
        """Has hosts forget the lists of a subgraph."""
        for island, hosts in subgraph.islands.items():
            lists = {host: subgraph.lists[host].fingerprint for host in hosts}
            self.orders.forget(island, subgraph.number, lists)

    def tell_waiters(self) -> None:
        """Arrays may have been made, or failed."""
        if not self._waiters:
            return
        for handle in list(self._waiters):
            gone = not self.arrays.table.has(handle)
            if gone or self.arrays.is_made(handle):
                for then in self._waiters.pop(handle):
                    then()
