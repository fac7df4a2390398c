"""Clients that are suspended: their arrays leave the devices for a place that outlives the islands.

*Suspended state* is what arrays of one slice were saved as: a checkpoint that hosts have written themselves,
in host memory (a directory on tmpfs) as far as a budget allows, else in a directory of a disk. The budget is
for all clients together. An array in suspended state keeps the client's handle, and has no devices; when its
client is resumed, the hosts of the slice as it lies then load it.

What `suspend` does, in order: the devices are taken, so that nothing more begins on them for this client;
what has been asked for before is waited for; each slice is saved; then the arrays leave their devices.
Failure sequence: there is no room in memory after all: it is saved to the directory instead. It cannot be
saved there either, or its island is lost meanwhile: the caller is told; what is still on devices stays there,
and is brought to the slice again after `resume`, as when a slice has moved. A load at `resume` fails: the
arrays have its error. Suspended state is removed as soon as no array is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from waystation._errors import Conflict, WaystationError
from waystation.runtime.controller.arrays import StoredArray
from waystation.runtime.controller.checkpoints import Gang, arrays_of, gang_of, processes_of, save_of
from waystation.runtime.controller.works import Work
from waystation.runtime.host_options import PARTIAL_LOAD, HostOptions, SaveManner
from waystation.runtime.ir import Value
from waystation.runtime.ir.program import item_bytes
from waystation.runtime.messages import Instruction, Load
from waystation.runtime.state_trees import StateTree

if TYPE_CHECKING:
    from waystation.runtime.controller.controller import Controller

OnEnd: TypeAlias = Callable[[WaystationError | None], None]
_MAY_HAVE_MORE = HostOptions(((PARTIAL_LOAD, True),))


@dataclass(frozen=True, slots=True)
class SuspendedStatePlaces:
    """Where suspended states go.

    Attributes:
        memory: A directory in the memory of the host, for all hosts the same; None if there is none.
        memory_bytes: The most that suspended states take there.
        directory: Where others go.
    """

    memory: str | None
    memory_bytes: int
    directory: str


@dataclass(slots=True, eq=False)
class SuspendedState:
    """Arrays of one slice that have been saved.

    Attributes:
        path: Where.
        memory_bytes: What they take of the budget.
        left: How many arrays are in it.
        loading: How many works load from it.
    """

    path: str
    memory_bytes: int
    left: int = 0
    loading: int = 0


class Suspensions:
    """See above.

    Args:
        controller: The controller.

    Attributes:
        places: Says where suspended states go; asked before each is made.
    """

    def __init__(self, controller: Controller) -> None:
        self.places: Callable[[], SuspendedStatePlaces] = lambda: SuspendedStatePlaces(None, 0, "")
        self._removed: list[str] = []
        self._controller = controller
        self._suspended_states: set[SuspendedState] = set()
        self._leaving: set[str] = set()  # clients
        self._number = 0

    @property
    def memory_bytes(self) -> int:
        """What suspended states take of the budget."""
        return sum(state.memory_bytes for state in self._suspended_states)

    # ---- suspend -------------------------------------------------------------------------------

    def suspend(self, client: str, on_end: OnEnd) -> None:
        """Takes the devices of all slices of a client, and what is on them.

        Raises:
            Conflict: It is being suspended already.
        """
        if client in self._leaving:
            raise Conflict(f"client '{client}' is being suspended already")
        self._leaving.add(client)
        self._controller.resources.suspend(client)
        owns = self._controller.arrays.of_client(client)
        left = len(owns) + 1

        def made() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._save_all(client, on_end)

        for own in owns:
            self._controller.when_made(client, own, made)
        made()

    def _save_all(self, client: str, on_end: OnEnd) -> None:
        groups = self._groups(client)
        failed: list[WaystationError] = []
        left = len(groups) + 1

        def ended(error: WaystationError | None) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                failed.append(error)
            if not left:
                self._leaving.discard(client)
                on_end(failed[0] if failed else None)

        for group in groups:
            self._save(client, group, ended, to_memory=True)
        ended(None)

    def _groups(self, client: str) -> list[dict[int, StoredArray]]:
        """What is to be saved together, by the client's handles: arrays of one slice, on the same hosts."""
        controller = self._controller
        named = set(controller.arrays.table.named().values())
        found: dict[tuple[int, Gang], dict[int, StoredArray]] = {}
        for own, stored in controller.arrays.of_client(client).items():
            number = stored.value.slice
            if (
                stored.suspended is not None
                or stored.handle in named
                or controller.arrays.error(stored.handle)
            ):
                continue
            if any(each.number == number and each.client == client for each in controller.resources.slices):
                found.setdefault((number, gang_of(stored.placement)), {})[own] = stored
        return list(found.values())

    def _save(self, client: str, group: dict[int, StoredArray], on_end: OnEnd, *, to_memory: bool) -> None:
        nbytes = sum(_bytes_of(stored.value) for stored in group.values())
        try:
            places = self.places()
        except WaystationError as error:
            on_end(error)
            return
        fits = places.memory is not None and self.memory_bytes + nbytes <= places.memory_bytes
        in_memory = to_memory and fits
        self._number += 1
        directory = places.memory if in_memory else places.directory
        state = SuspendedState(f"{directory}/{self._number}", nbytes if in_memory else 0)
        self._suspended_states.add(state)
        controller = self._controller
        stored = list(group.values())
        key = controller.new_key(client)
        controller.arrays.table.use([each.handle for each in stored], key)
        placed = list(enumerate(stored))
        save = save_of(state.path, _tree_of(group), placed, processes_of(controller, stored), SaveManner())

        def end(work: Work) -> None:
            if work.error is None:
                self._leave(client, group, state)
            else:
                self._remove(state)
            controller.collect(controller.arrays.finish_run(key))
            lost = any(controller.arrays.error(each.handle) is not None for each in stored)
            if work.error is not None and in_memory and client in controller.clients and not lost:
                self._save(client, group, on_end, to_memory=False)
            else:
                on_end(work.error)

        controller.works.using(stored, controller.new_key(client), "suspend", "save", lambda: (save,), end)()

    def _leave(self, client: str, group: dict[int, StoredArray], state: SuspendedState) -> None:
        """Arrays that have been saved leave their devices; those that have ended meanwhile are gone."""
        arrays = self._controller.arrays
        present = arrays.of_client(client)
        for own, stored in group.items():
            if present.get(own) is stored:
                state.left += 1
                self._controller.collect(arrays.suspend(client, own, state))
        self._settle(state)

    # ---- resume --------------------------------------------------------------------------------

    def resume(self, client: str, without_hosts: Collection[str] = ()) -> None:
        """Gives the slices of a client devices again, and has hosts load suspended state.

        Raises:
            NotEnoughDevices: They do not all fit; it stays suspended.
            Conflict: It is still being suspended.
        """
        if client in self._leaving:
            raise Conflict(f"client '{client}' is being suspended; resume it when that has ended")
        self._controller.resources.resume(client, without_hosts)
        to_load: dict[SuspendedState, dict[int, StoredArray]] = {}
        for own, stored in self._controller.arrays.of_client(client).items():
            if isinstance(stored.suspended, SuspendedState):
                to_load.setdefault(stored.suspended, {})[own] = stored
        for state, group in to_load.items():
            self._load(client, state, group)

    def _load(self, client: str, state: SuspendedState, group: dict[int, StoredArray]) -> None:
        controller = self._controller
        key = controller.new_key(client)
        made_arrays: list[StoredArray] = []
        state.loading += 1
        for own, stored in group.items():
            placement = controller.placement(stored.value.slice)
            made = controller.arrays.create(client, None, stored.value, placement, key, stored.program)
            made_arrays.append(made)
            controller.collect(controller.arrays.replace(client, own, made))
        processes = processes_of(controller, made_arrays)
        arrays = arrays_of(list(enumerate(made_arrays)))
        # Some of what was saved may have been freed meanwhile; nobody else writes there.
        load = Load(state.path, _tree_of(group), arrays, processes, options=_MAY_HAVE_MORE)

        def tell() -> tuple[Instruction, ...]:
            return (load,)

        def loaded(work: Work) -> None:
            state.loading -= 1
            self._settle(state)

        controller.works.making(made_arrays, key, "resume", tell, loaded, is_load=True)()

    # ---- suspended states ----------------------------------------------------------------------

    def take_removed(self) -> list[str]:
        """The paths of suspended states that nobody needs any more, since this was asked last."""
        for state in self._controller.arrays.take_left_states():
            if isinstance(state, SuspendedState):
                state.left -= 1
                self._settle(state)
        removed, self._removed = self._removed, []
        return removed

    def _settle(self, state: SuspendedState) -> None:
        if not state.left and not state.loading:
            self._remove(state)

    def _remove(self, state: SuspendedState) -> None:
        if state in self._suspended_states:
            self._suspended_states.discard(state)
            self._removed.append(state.path)


def _tree_of(group: Iterable[int]) -> StateTree:
    """A dict with the client's handles as keys."""
    return StateTree.of_names([str(own) for own in group])


def _bytes_of(value: Value) -> int:
    return math.prod(value.shape) * item_bytes(value.dtype)
