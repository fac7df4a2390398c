"""What clients ask of arrays that is no program: each call is a work of one island.

Arrays are put and fetched through the controller, so these are to be small; a checkpoint is saved and loaded
by the hosts themselves, which are told its path and the names of its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from waystation._errors import InvalidInput, WaystationError
from waystation.runtime.controller.arrays import StoredArray
from waystation.runtime.controller.works import HostPart, IslandPart, Work
from waystation.runtime.ir import Value
from waystation.runtime.messages import Block, Get, Instruction, Load, Put, Save
from waystation.runtime.objects import Reservation
from waystation.runtime.resources import Placement
from waystation.runtime.scheduling import RunKey

if TYPE_CHECKING:
    from waystation.runtime.controller.controller import Controller

OnEnd: TypeAlias = Callable[[Work], None]


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
        self._submit_made([stored], key, "put", lambda host: (make,))

    def get(self, client: str, own: int, on_end: OnEnd) -> None:
        """Fetches an array.

        Raises:
            WaystationError: It is not there.
        """
        stored = self._controller.arrays.get(client, own)
        key = self._controller.new_key(client)
        self._controller.arrays.table.use([stored.handle], key)

        def end(work: Work) -> None:
            self._controller.collect(self._controller.arrays.finish_run(key))
            on_end(work)

        instruction = Get(int(stored.handle))
        self._submit_using([stored], key, stored.program, "get", lambda host: (instruction,), end)

    def save(
        self, client: str, path: str, arrays: Sequence[tuple[str, int]], overwrite: bool, on_end: OnEnd
    ) -> None:
        """Has hosts save arrays, which are to be on one island.

        Raises:
            WaystationError: One is not there, or they are on several islands.
        """
        stored = [self._controller.arrays.get(client, own) for _, own in arrays]
        processes = self._processes(path, stored)
        key = self._controller.new_key(client)
        self._controller.arrays.table.use([each.handle for each in stored], key)

        def end(work: Work) -> None:
            self._controller.collect(self._controller.arrays.finish_run(key))
            on_end(work)

        named = [(name, each) for (name, _), each in zip(arrays, stored, strict=True)]
        save = Save(path, tuple((name, int(each.handle)) for name, each in named), processes, overwrite)
        self._submit_using(stored, key, f"save '{path}'", "save", lambda host: (save,), end)

    def load(self, client: str, path: str, arrays: Sequence[tuple[str, int, Value]]) -> None:
        """Has hosts make arrays of a checkpoint, on one island; values have the numbers of slices."""
        key = self._controller.new_key(client)
        try:
            for _, _, value in arrays:
                self._controller.own_slice(client, value.slice)
            placements = [self._controller.placement(value.slice) for _, _, value in arrays]
            self._one_island(path, placements)
            stored = [
                self._controller.arrays.create(client, own, value, placement, key, f"load '{path}'")
                for (_, own, value), placement in zip(arrays, placements, strict=True)
            ]
        except WaystationError as error:
            self._controller.collect(self._controller.arrays.fail_run(key, error))
            for _, own, _ in arrays:
                self._controller.arrays.fail(client, own, error, key)
            self._controller.tell_waiters()
            return
        load = Load(
            path,
            tuple(
                (name, int(each.handle), each.value, each.placement)
                for (name, _, _), each in zip(arrays, stored, strict=True)
            ),
            self._processes(path, stored),
        )
        self._submit_made(stored, key, f"load '{path}'", lambda host: (load,))

    def _processes(self, path: str, stored: Sequence[StoredArray]) -> tuple[int, ...]:
        """The numbers, in their island, of the hosts that hold arrays."""
        island = self._one_island(path, [each.placement for each in stored])
        return self._controller.numbers_of_hosts(island, {host for each in stored for host in each.hosts})

    def _one_island(self, path: str, placements: Sequence[Placement]) -> str:
        islands = sorted({placement.island for placement in placements})
        if len(islands) != 1:
            raise InvalidInput(
                f"arrays of checkpoint '{path}' are on islands {islands}: one call saves or loads those of "
                "one island; use a path for each"
            )
        return islands[0]

    # ---- how ------------------------------------------------------------------------------------

    def _submit_made(
        self,
        stored: Sequence[StoredArray],
        key: RunKey,
        program: str,
        tell: Callable[[str], tuple[Instruction, ...]],
    ) -> None:
        def end(work: Work) -> None:
            if work.error is None:
                self._controller.collect(self._controller.arrays.finish_run(key))
            else:
                self._controller.collect(self._controller.arrays.fail_run(key, work.error))
            self._controller.tell_waiters()

        def reserve(host: str) -> Reservation:
            outputs = {each.handle: each.on(host) for each in stored if host in each.hosts}
            peak: dict[int, int] = {}
            for held in outputs.values():
                for device, taken in held.items():
                    peak[device] = peak.get(device, 0) + taken
            return Reservation(key, peak, outputs=outputs)

        self._submit(stored, key, program, program, tell, reserve, end)

    def _submit_using(
        self,
        stored: Sequence[StoredArray],
        key: RunKey,
        program: str,
        kind: str,
        tell: Callable[[str], tuple[Instruction, ...]],
        end: OnEnd,
    ) -> None:
        def reserve(host: str) -> Reservation:
            return Reservation(key, {}, operands=tuple(each.handle for each in stored if host in each.hosts))

        self._submit(stored, key, program, kind, tell, reserve, end)

    def _submit(
        self,
        stored: Sequence[StoredArray],
        key: RunKey,
        program: str,
        kind: str,
        tell: Callable[[str], tuple[Instruction, ...]],
        reserve: Callable[[str], Reservation],
        end: OnEnd,
    ) -> None:
        """A work of one island, on the hosts of some arrays."""
        island = stored[0].placement.island
        hosts = {host: HostPart(tell(host), reserve(host)) for each in stored for host in each.hosts}
        numbers = self._controller.clients.numbers(key.client)
        part = IslandPart(self._controller.orders.epoch(island), hosts, numbers.position(island))
        self._controller.orders.submit(
            Work(
                number=key.run,
                key=key,
                fingerprint=kind,
                program=program,
                computation=kind,
                parts={island: part},
                order=None,
                uses=tuple(each.run for each in stored if each.run != key),
                on_end=end,
            )
        )
