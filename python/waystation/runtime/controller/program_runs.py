"""One run of a program: a work for each of its subgraphs, one after the other, and its arrays.

All subgraphs get their places in the client's order at once, so nothing that the client asks for later comes
between them; each is submitted when the one before it has ended. What a subgraph makes for a later one is an
object of the run's own. When a subgraph fails, those after it take their places and do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from waystation._errors import InvalidInput, WaystationError
from waystation.runtime.controller.arrays import StoredArray
from waystation.runtime.controller.lowered import Lowered, Subgraph
from waystation.runtime.controller.works import HostPart, IslandPart, Prepare, Work
from waystation.runtime.ir import Arg, Program, Reshard, Result, SliceShape, Value
from waystation.runtime.messages import Run
from waystation.runtime.objects import Collect, Handle, Reservation
from waystation.runtime.resources import Placement
from waystation.runtime.scheduling import RunKey

if TYPE_CHECKING:
    from waystation.runtime.controller.controller import Controller


class ProgramRun:
    """See above.

    Args:
        controller: The controller.
        client: Whose it is.
        fingerprint: Of the program, which is installed.
        cost_seconds: What the client says that it takes.
        priority: Higher ones go first.
    """

    def __init__(
        self,
        controller: Controller,
        client: str,
        fingerprint: str,
        cost_seconds: float | None = None,
        priority: int = 0,
    ) -> None:
        self._controller = controller
        self._client = client
        self._fingerprint = fingerprint
        self._key = controller.new_key(client)
        self._installed = controller.programs.begin(fingerprint, self._key)
        self._lowered: Lowered | None = None
        self._program = self._installed.program
        self._cost_seconds = cost_seconds
        self._priority = priority
        self._handles: dict[int, Handle] = {}  # of values
        self._own: list[StoredArray] = []  # between subgraphs
        self._donated: list[StoredArray] = []
        self._uses: tuple[RunKey, ...] = ()
        self._waiting: list[Work] = []

    def start(self, slices: Sequence[int], arguments: Sequence[int], results: Sequence[int]) -> None:
        """Submits it, by the client's handles; what keeps it from running is in those of the results."""
        try:
            placements = self._placements(slices)
            subgraphs = self._lower(placements)
            granted = dict(zip((part.number for part in self._program.slices), slices, strict=True))
            there = dict(zip(slices, placements, strict=True))
            stored = self._arguments(granted, there, arguments)
            returned = self._program.nodes[-1].operands
            if len(returned) != len(results):
                raise InvalidInput(
                    f"program '{self._program.name}' returns {len(returned)} arrays, not {len(results)}"
                )
            self._controller.arrays.table.use([each.handle for each in stored], self._key)
            self._uses = tuple(each.run for each in stored)
            self._donate(arguments)
            values = self._program.values
            for number, own in zip(returned, results, strict=True):
                value = values[number]
                slice_number = granted[value.slice]
                self._create(value, slice_number, own, there[slice_number])
            self._make_works(subgraphs, granted, there)
        except WaystationError as error:
            self._refuse(arguments, results, error)
        else:
            self._submit_next(None)

    def bring(self, stored: StoredArray, placement: Placement, slice_number: int) -> StoredArray:
        """Submits it as a program that copies an array to where its slice is now; returns the copy."""
        controller = self._controller
        try:
            subgraphs = self._lower((stored.placement, placement))
        except WaystationError:
            self._leave()
            raise
        controller.arrays.table.use([stored.handle], self._key)
        self._handles[0] = stored.handle
        self._uses = (stored.run,)
        made = self._create(self._program.values[1], slice_number, None, placement)
        self._make_works(subgraphs, {0: stored.value.slice, 1: slice_number}, {slice_number: placement})
        self._submit_next(None)
        return made

    def prepare_ahead(self, slices: Sequence[int], then: Callable[[WaystationError | None], None]) -> None:
        """Has hosts compile it where its slices are now, and does not run it.

        Args:
            slices: Its slices.
            then: Is told once what came of it: the first error, or None.

        Raises:
            WaystationError: The slices are not the client's, or have no devices.
        """
        orders, found = self._controller.orders, list[WaystationError | None]()
        try:
            subgraphs = self._lower(self._placements(slices))
        except WaystationError:
            self._leave()
            raise
        wanted = [(subgraph, island) for subgraph in subgraphs for island in subgraph.islands]

        def note(error: WaystationError | None) -> None:
            found.append(error)
            if len(found) == len(wanted):
                end(next((each for each in found if each is not None), None))

        def end(error: WaystationError | None) -> None:
            self._leave()
            then(error)

        for subgraph, island in wanted:
            make = functools.partial(_preparation, subgraph, island, orders.epoch(island))
            orders.prepare_ahead(island, subgraph.number, make, note)
        if not wanted:
            end(None)

    def _lower(self, placements: tuple[Placement, ...]) -> tuple[Subgraph, ...]:
        self._lowered = self._controller.programs.use(self._fingerprint, placements)
        return self._lowered.subgraphs

    def _leave(self) -> None:
        """Nothing of it is left: the program may be forgotten."""
        self._controller.programs.end(self._fingerprint, self._key, self._lowered)

    # ---- arrays --------------------------------------------------------------------------------

    def _placements(self, slices: Sequence[int]) -> tuple[Placement, ...]:
        if len(slices) != len(self._program.slices):
            raise InvalidInput(
                f"program '{self._program.name}' runs on {len(self._program.slices)} slices, "
                f"not {len(slices)}"
            )
        for number in slices:
            self._controller.own_slice(self._client, number)
        return tuple(self._controller.placement(number) for number in slices)

    def _arguments(
        self, granted: dict[int, int], there: dict[int, Placement], arguments: Sequence[int]
    ) -> list[StoredArray]:
        nodes = self._program.arguments
        if len(nodes) != len(arguments):
            raise InvalidInput(
                f"program '{self._program.name}' takes {len(nodes)} arrays, not {len(arguments)}"
            )
        found = []
        for node, own in zip(nodes, arguments, strict=True):
            stored = self._controller.arrays.get(self._client, own)
            wanted, given = node.result, stored.value
            if (wanted.shape, wanted.dtype, wanted.sharding) != (given.shape, given.dtype, given.sharding):
                raise InvalidInput(
                    f"argument '{node.label}' of program '{self._program.name}' is {wanted.dtype}"
                    f"{wanted.shape} sharded by {wanted.sharding.spec}, array {own} is {given.dtype}"
                    f"{given.shape} sharded by {given.sharding.spec}"
                )
            number = granted[wanted.slice]
            placement = there[number]
            if stored.placement is not placement and stored.placement.devices != placement.devices:
                stored = self._controller.bring(self._client, own, stored, placement, number)
            self._handles[wanted.number] = stored.handle
            found.append(stored)
        return found

    def _donate(self, arguments: Sequence[int]) -> None:
        for node, own in zip(self._program.arguments, arguments, strict=True):
            if node.donated:
                self._donated.append(self._controller.arrays.donate(self._client, own))

    def _create(
        self,
        value: Value,
        slice_number: int,
        own: int | None,
        placement: Placement,
    ) -> StoredArray:
        made = self._controller.arrays.create(
            self._client,
            own,
            self._installed.value_on(value, slice_number),
            placement,
            self._key,
            self._program.name,
        )
        self._handles[value.number] = made.handle
        return made

    def _refuse(self, arguments: Sequence[int], results: Sequence[int], error: WaystationError) -> None:
        """It does not run at all."""
        controller = self._controller
        told = error.where(program=self._program.name)
        gone = [own for node, own in zip(self._program.arguments, arguments, strict=False) if node.donated]
        controller.collect(controller.arrays.fail_run(self._key, told))
        controller.collect(controller.arrays.free(self._client, gone))
        self._forget_donated()
        for own in results:
            controller.arrays.fail(self._client, own, told, RunKey(self._client, controller.new_number()))
        self._leave()
        controller.tell_waiters()

    def _forget_donated(self) -> None:
        self._controller.collect([Collect(each.handle, each.hosts) for each in self._donated])

    # ---- works ---------------------------------------------------------------------------------

    def _make_works(
        self, subgraphs: Sequence[Subgraph], granted: dict[int, int], there: dict[int, Placement]
    ) -> None:
        for subgraph in subgraphs:
            for number in subgraph.outputs:
                if number not in self._handles:
                    value = self._program.values[number]
                    slice_number = granted[value.slice]
                    self._own.append(self._create(value, slice_number, None, there[slice_number]))
        numbers = self._controller.clients.numbers(self._client)
        for place, subgraph in enumerate(subgraphs):
            order: int | None = None
            if len(subgraph.islands) == 1:
                (island,) = subgraph.islands
                positions = {island: numbers.position(island)}
            else:
                order, spanning = numbers.spanning(subgraph.islands)
                positions = dict(spanning)
            key = RunKey(self._client, self._key.run, place)
            parts = {
                island: IslandPart(
                    self._controller.orders.epoch(island),
                    {host: self._host_part(subgraph, host, key) for host in hosts},
                    positions[island],
                )
                for island, hosts in subgraph.islands.items()
            }
            work = Work(
                number=self._controller.new_number(),
                key=key,
                fingerprint=f"{self._fingerprint} {place}",
                program=self._program.name,
                computation=subgraph.computation,
                parts=parts,
                order=order,
                cost_seconds=self._cost_seconds,
                priority=self._priority,
                uses=self._uses,
                on_end=self._submit_next,
            )
            self._waiting.append(work)
            self._prepare(work, subgraph)

    def _host_part(self, subgraph: Subgraph, host: str, key: RunKey) -> HostPart:
        listed, takes, handles = subgraph.lists[host], subgraph.footprints[host], self._handles
        arguments = tuple([handles[number] for number in listed.arguments])
        results = tuple([handles[number] for number in listed.results])
        consumed: tuple[Handle, ...] = ()
        if subgraph.ended:
            consumed = tuple([handles[number] for number in listed.arguments if number in subgraph.ended])
        peers: tuple[tuple[str, str], ...] = ()
        if subgraph.senders[host]:
            addresses = self._controller.addresses
            peers = tuple([(sender, addresses[sender]) for sender in subgraph.senders[host]])
        run = Run(listed.fingerprint, arguments, results, consumed, peers)
        outputs = {handles[number]: takes.outputs[number] for number in listed.results}
        return HostPart((run,), Reservation(key, takes.peak, arguments, consumed, outputs))

    def _prepare(self, work: Work, subgraph: Subgraph) -> None:
        for island in subgraph.islands:
            make = functools.partial(_preparation, subgraph, island, work.parts[island].epoch)
            self._controller.orders.prepare(island, subgraph.number, work, make)

    def _submit_next(self, before: Work | None) -> None:
        """Submits the next subgraph; after the last one the run has ended."""
        error = None if before is None else before.error
        if self._waiting:
            work = self._waiting.pop(0)
            work.error = work.error or error
            self._controller.orders.submit(work)
            return
        controller = self._controller
        if error is None:
            controller.arrays.end(self._own)
            controller.collect(controller.arrays.finish_run(self._key))
        else:
            told = error.where(program=self._program.name)
            controller.collect(controller.arrays.fail_run(self._key, told))
            controller.arrays.end(self._own)
            self._forget_donated()
        self._leave()
        controller.tell_waiters()


def _preparation(subgraph: Subgraph, island: str, epoch: int, number: int) -> Prepare:
    lists = {host: subgraph.lists[host] for host in subgraph.islands[island]}
    return Prepare(number, island, epoch, lists, subgraph.functions[island], subgraph.host_calls[island])


def program_that_brings(stored: StoredArray, devices: int) -> Program:
    """The program that copies an array from one slice to another of as many devices."""
    source = replace(stored.value, number=0, slice=0)
    target = replace(stored.value, number=1, slice=1)
    slices = SliceShape(0, (devices,)), SliceShape(1, (devices,))
    return Program("bring", slices, (Arg("array", source), Reshard(0, target), Result((1,))))
