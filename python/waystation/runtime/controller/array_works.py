"""What clients ask of arrays that is no program: each is a work of one island.

Arrays are put and fetched through the controller, so these are to be small; a checkpoint (`checkpoints`) is
saved and loaded by the hosts themselves. A work gets its number, and its place among all that its client asks
of its island, when it is made; it can be submitted later, and what it tells hosts is asked for only then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from waystation._errors import WaystationError
from waystation.runtime.controller.arrays import StoredArray, require_placed
from waystation.runtime.controller.works import HostPart, IslandPart, Work
from waystation.runtime.ir import Value
from waystation.runtime.messages import Block, Get, Instruction, Put, is_transfer
from waystation.runtime.objects import Reservation
from waystation.runtime.scheduling import ClientNumbers, RunKey

if TYPE_CHECKING:
    from waystation.runtime.controller.controller import Controller

OnEnd: TypeAlias = Callable[[Work], None]
Tell: TypeAlias = Callable[[], tuple[Instruction, ...]]


class Submit:
    """Submits a work that was made before.

    Args:
        controller: The controller.
        work: The work.
        tell: What each of its hosts is told.
    """

    def __init__(self, controller: Controller, work: Work, tell: Tell) -> None:
        self._controller = controller
        self._work = work
        self._tell = tell

    def __call__(self, error: WaystationError | None = None) -> None:
        """Submits it; with an error it takes its place and does nothing."""
        self._work.error = self._work.error or error
        if self._work.error is None:
            told = self._tell()
            self._work.is_transfer = is_transfer(told)
            if self._work.is_transfer:
                self._work.cost_seconds = 0.0
            for part in self._work.parts.values():
                for host in part.hosts.values():
                    host.instructions = told
        self._controller.orders.submit(self._work)


class ArrayWorks:
    """See above.

    Args:
        controller: The controller.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def put(self, client: str, own: int, array: Block, value: Value) -> None:
        """Makes an array of one that was sent; its value has the number of the slice."""
        key = self._controller.new_key(client)
        try:
            self._controller.own_slice(client, value.slice)
            placement = self._controller.placement(value.slice)
            stored = self._controller.arrays.create(client, own, value, placement, key, "put")
        except WaystationError as error:
            self._controller.arrays.fail(client, own, error, key)
            self._controller.tell_waiters()
            return
        # The number is the client's, and means nothing to hosts.
        make = Put(int(stored.handle), array, replace(value, number=0), placement)
        self.making([stored], key, "put", lambda: (make,))()

    def get(self, client: str, own: int, on_end: OnEnd) -> None:
        """Fetches an array.

        Raises:
            WaystationError: It is not there.
        """
        stored = require_placed(self._controller.arrays.get(client, own), own, client)
        key = self._controller.new_key(client)
        self._controller.arrays.table.use([stored.handle], key)

        def end(work: Work) -> None:
            self._controller.collect(self._controller.arrays.finish_run(key))
            on_end(work)

        instruction = Get(int(stored.handle))
        self.using([stored], key, stored.program, "get", lambda: (instruction,), end)()

    # ---- works of one island -------------------------------------------------------------------

    def making(
        self,
        stored: Sequence[StoredArray],
        key: RunKey,
        program: str,
        tell: Tell,
        on_end: OnEnd = lambda work: None,
        *,
        is_load: bool = False,
    ) -> Submit:
        """A work that makes arrays of one island, which have been created for it.

        Args:
            stored: The arrays.
            key: Of the work.
            program: For people.
            tell: What each of its hosts is told.
            on_end: Called when it has ended.
            is_load: Whether they are loaded: what uses them gets its place only when they are there.
        """

        def end(work: Work) -> None:
            if work.error is None:
                self._controller.collect(self._controller.arrays.finish_run(key))
            else:
                self._controller.collect(self._controller.arrays.fail_run(key, work.error))
            on_end(work)
            self._controller.tell_waiters()

        def reserve(host: str) -> Reservation:
            outputs = {each.handle: each.on(host) for each in stored if host in each.hosts}
            peak: dict[int, int] = {}
            for held in outputs.values():
                for device, taken in held.items():
                    peak[device] = peak.get(device, 0) + taken
            return Reservation(key, peak, outputs=outputs)

        submit = self._of_arrays(stored, key, program, program, tell, reserve, end)
        if is_load:
            self._controller.orders.loads.add(key)
        return submit

    def using(
        self,
        stored: Sequence[StoredArray],
        key: RunKey,
        program: str,
        kind: str,
        tell: Tell,
        end: OnEnd,
    ) -> Submit:
        """A work that uses arrays of one island, which somebody keeps from ending."""

        def reserve(host: str) -> Reservation:
            return Reservation(key, {}, operands=tuple(each.handle for each in stored if host in each.hosts))

        return self._of_arrays(stored, key, program, kind, tell, reserve, end)

    def at_host(
        self,
        island: str,
        host: str,
        key: RunKey,
        numbers: ClientNumbers,
        program: str,
        kind: str,
        tell: Tell,
        end: OnEnd,
    ) -> Submit:
        """A work of one host, without arrays.

        Args:
            island: Its island.
            host: The host.
            key: Of the work.
            numbers: Of the client, who may be gone by now.
            program: For people.
            kind: What its cost is learned by.
            tell: What the host is told.
            end: Called when it has ended.
        """
        position = numbers.position(island)
        return self._make(
            island, [host], key, position, program, kind, tell, lambda _: Reservation(key, {}), (), end
        )

    def _of_arrays(
        self,
        stored: Sequence[StoredArray],
        key: RunKey,
        program: str,
        kind: str,
        tell: Tell,
        reserve: Callable[[str], Reservation],
        end: OnEnd,
    ) -> Submit:
        island = stored[0].placement.island
        hosts = {host for each in stored for host in each.hosts}
        position = self._controller.clients.numbers(key.client).position(island)
        uses = tuple(each.run for each in stored if each.run != key)
        return self._make(island, hosts, key, position, program, kind, tell, reserve, uses, end)

    def _make(
        self,
        island: str,
        hosts: Collection[str],
        key: RunKey,
        position: int,
        program: str,
        kind: str,
        tell: Tell,
        reserve: Callable[[str], Reservation],
        uses: tuple[RunKey, ...],
        end: OnEnd,
    ) -> Submit:
        parts = {host: HostPart((), reserve(host)) for host in sorted(hosts)}
        work = Work(
            number=key.run,
            key=key,
            fingerprint=kind,
            program=program,
            computation=kind,
            parts={island: IslandPart(self._controller.orders.epoch(island), parts, position)},
            order=None,
            uses=uses,
            on_end=end,
        )
        return Submit(self._controller, work, tell)
